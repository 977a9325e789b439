from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from step_cases import CASES, StepCase, run, stored_and_loaded, tied
from torch import nn
from torch.utils import _pytree as pytree

from gt_trace import InputMismatchError, TracedStep, graph_text, trace_step
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import document_differences
from gt_trace.artifacts.step_document import STEP_FORM
from gt_trace.errors import ArtifactError
from gt_trace.stamping.compare_steps import step_differences


@pytest.fixture(params=list(CASES), scope="module")
def case(request: pytest.FixtureRequest) -> StepCase:
    return CASES[request.param]()


def document_of(step: TracedStep) -> Any:
    return json.loads(json.dumps(STEP_FORM.encode(step, MeshAxes.of()).document))


def loaded(document: Any) -> TracedStep:
    return STEP_FORM.decode(document, MeshAxes.of(), blob=lambda name: b"")


def test_a_loaded_step_is_the_captured_one_in_all_that_can_be_seen(case: StepCase) -> None:
    loaded_step = stored_and_loaded(case.step)

    assert step_differences(case.step, loaded_step) == []
    assert graph_text(loaded_step.graph_module) == graph_text(case.step.graph_module)
    assert loaded_step.mode == case.step.mode


def test_a_loaded_step_computes_the_same_bits(case: StepCase) -> None:
    state = copy.deepcopy(case.module.state_dict())
    ours = run(case, case.step)
    case.module.load_state_dict(state)
    theirs = run(case, stored_and_loaded(case.step))

    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(one, other)


def test_storing_a_loaded_step_gives_the_same_document(case: StepCase) -> None:
    again = STEP_FORM.encode(stored_and_loaded(case.step), MeshAxes.of()).document

    assert json.loads(json.dumps(again)) == document_of(case.step)


def test_a_loaded_step_refuses_other_inputs_as_the_captured_one_does() -> None:
    case = tied()
    bound = stored_and_loaded(case.step).bind(case.module)

    with pytest.raises(InputMismatchError, match=r"tokens: torch.int64 \[2, 3\], captured as"):
        bound(torch.zeros(2, 3, dtype=torch.int64), case.inputs[1])


def test_a_mask_of_other_code_is_refused() -> None:
    case = CASES["attention"]()
    x, mask = case.inputs
    other = copy.copy(mask)
    other.mask_mod = lambda b, h, q, k: q <= k
    bound = stored_and_loaded(case.step).bind(case.module)

    with pytest.raises(InputMismatchError, match="mask"):
        bound(x, other)


def test_documents_of_steps_with_other_constants_differ() -> None:
    steps = [
        trace_step(lambda x, value=value: x * torch.tensor([1.0, value]), constants="allow")(
            torch.ones(2)
        )
        for value in (0.0, 1.0)
    ]

    (difference,) = document_differences(*map(document_of, steps))

    assert not difference.is_number
    document, other = (STEP_FORM.encode(each, MeshAxes.of()) for each in steps)
    with pytest.raises(ArtifactError, match="is not the one that the graph was made with"):
        STEP_FORM.decode(document.document, MeshAxes.of(), blob=other.blobs.__getitem__)


def test_refuses_dynamic_sizes_by_name() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    step = trace_step(lambda x: model(x).sum(), module=model)(x)

    with pytest.raises(ArtifactError) as refused:
        STEP_FORM.encode(step, MeshAxes.of())
    assert str(refused.value) == (
        "a step with dynamic sizes of inputs cannot be stored: what the trace assumed of them are "
        "guards of the tracer. Capture with static sizes, one step for each"
    )


def test_refuses_a_graph_for_which_code_was_generated() -> None:
    case = tied()
    graph = case.step.graph_module.graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.target = lambda *args: args  # as a compiler's product is

    with pytest.raises(
        ArtifactError, match=rf"node {node.name}: a stored graph cannot call .*code"
    ):
        STEP_FORM.encode(case.step, MeshAxes.of())


@pytest.mark.parametrize(
    "operator",
    [
        "os::system.default",
        "aten::from_file.default",
        "aten::save.default",
        "aten::manual_seed.default",
        "aten::nothing_of_this_name.default",
        "aten::mm.nothing",
        "operator.attrgetter",
        "builtins.eval",
        "higher_order::cond",
        "torch.load",
        "__class__::__init__",
        "aten::__class__",
        7,
        None,
    ],
)
def test_an_operator_outside_of_the_list_is_refused_before_anything_is_made(
    operator: object,
) -> None:
    document = document_of(tied().step)
    document["operators"][0] = operator

    with pytest.raises(ArtifactError, match=r"stored graph calls|named by text"):
        loaded(document)


def test_a_node_cannot_read_what_does_not_stand_before_it() -> None:
    document = document_of(tied().step)
    nodes = document["content"]["graph"]["nodes"]
    position = next(n for n, node in enumerate(nodes) if node[0] == "c")
    nodes[position][3][0] = ["n", position]

    with pytest.raises(ArtifactError):
        loaded(document)


@pytest.mark.parametrize("names", [("dtype", "dtype"), ("dtype", 1)])
def test_keyword_arguments_have_names_of_their_own(names: tuple[object, ...]) -> None:
    document = document_of(tied().step)
    node = document["content"]["graph"]["nodes"][-2]
    node[4] = [[name, None] for name in names]

    with pytest.raises(ArtifactError, match="keyword arguments without a name of their own"):
        loaded(document)


def test_tensors_lie_in_memory_of_the_same_size_as_before() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = x.exp()
        return made[1:, 1:], made.t(), made[:0], x[:0].clone(), x.sum(0).expand(2, 3)

    captured = trace_step(step)(torch.arange(20.0).view(4, 5)[1:, 2:])
    read = loaded(document_of(captured))

    assert step_differences(captured, read) == []
    sizes = [
        [
            (value.untyped_storage().nbytes(), value.storage_offset())
            for node in each.graph_module.graph.nodes
            if isinstance(value := node.meta.get("val"), torch.Tensor)
        ]
        for each in (captured, read)
    ]
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 3


@pytest.mark.parametrize("size", [10**30, -1, "u99", ["__import__", "os"], ["Symbol", 1]])
def test_sizes_that_there_cannot_be_are_refused(size: object) -> None:
    document = document_of(tied().step)
    document["storages"][0] = ["s", size]

    with pytest.raises(ArtifactError):
        loaded(document)


def _places(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(item, dict):
        inner = list(item.items())
    else:
        inner = list(enumerate(item)) if isinstance(item, list) else []
    return found + [place for key, each in inner for place in _places(each, (*path, key))]


def _damaged(document: Any, generator: torch.Generator) -> Any:
    """A document in which one place is gone, another, or that of its neighbour."""
    places = _places(document)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    *path, key = places[draw(len(places))]
    holder = document
    for step in path:
        holder = holder[step]
    other = document
    for step in places[draw(len(places))]:
        other = other[step]
    junk = [None, -1, 2**40, "x", [], {}, ["n", 0], ["T", 0, 0, 0], ["op", 1], other]
    kind = draw(len(junk) + 1)
    if kind < len(junk):
        holder[key] = junk[kind]
    elif isinstance(holder, dict):
        del holder[key]
    else:
        holder.insert(key, holder[draw(len(holder))])
    return document


@pytest.mark.parametrize(
    "num_cases", [60, pytest.param(3_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("name", ["tied", "run_time_sizes"])
def test_whatever_a_document_says_is_refused_or_is_a_step(name: str, num_cases: int) -> None:
    """Nothing but ``ArtifactError`` comes out of a document of which the hash fits."""
    text = json.dumps(document_of(CASES[name]().step))
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(num_cases):
        document = _damaged(json.loads(text), generator)
        try:
            assert isinstance(loaded(document), TracedStep)
        except ArtifactError:
            refused += 1
    assert refused > num_cases // 2


def test_steps_with_an_optimizer_or_a_generator_are_not_stored() -> None:
    model, generator = nn.Linear(2, 2), torch.Generator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return model(x) * torch.rand(2, generator=generator)

    def stepping(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(1, 2)
    with pytest.raises(ArtifactError, match="an optimizer steps inside of this step"):
        document_of(trace_step(stepping, module=model, optimizer=optimizer)(x))
    with pytest.raises(ArtifactError, match="Generator"):
        document_of(trace_step(noisy, module=model)(x))
