"""A plan file gives the same plan back, or a refusal that says what differs."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_doubles import (
    FSDP,
    S0,
    S1,
    TENSOR_PARALLEL,
    Prices,
    TwoLayers,
    plan_by_hand,
    two_layer_graph,
)

from gt_autoparallel import decode_plan, find_placement, plan_digest
from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.graph_encoding import canonical_json
from gt_autoparallel.graph.layouts import MeshShape, short_text
from gt_autoparallel.plan.plan_encoding import encode_plan
from gt_autoparallel.plan_file import (
    FORMAT_VERSION,
    check_plan_file,
    check_plan_fits,
    load_plan,
    read_plan,
    tensors_of_parts,
    write_plan,
    write_plans,
)
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import Constraints, LayoutConstraint, ResolvedRequest

REQUEST = ResolvedRequest(
    constraints=(LayoutConstraint(node="x", side="output", position=0, placements=(S0, None)),),
    memory_budget_bytes=10**6,
    replicate_unknown=("aten.foo.default",),
)


@pytest.fixture(scope="module")
def plan():
    return plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL), request=REQUEST)


def test_a_digest_tells_what_a_plan_decides_and_not_how_it_was_found(plan):
    digest = plan_digest(plan)
    again = decode_plan(json.loads(canonical_json(encode_plan(plan))), Prices())
    assert plan_digest(again) == digest
    assert plan_digest(replace(plan, request=ResolvedRequest())) == digest
    others = [
        plan_by_hand(("dp", 2, FSDP), ("tp", 2, FSDP)),
        plan_by_hand(("dp", 2, FSDP), ("other", 2, TENSOR_PARALLEL)),
        replace(plan, recomputed=(4,)),
        replace(plan, redistributions=plan.redistributions[1:]),
    ]
    assert len({digest, *map(plan_digest, others)}) == 5


def test_plans_of_parts_that_are_alike_but_for_names_can_have_one_digest(plan):
    named = {node.name for node in plan.graph.nodes}
    assert "x" in named
    renamed = plan_digest(plan, renamed=lambda text: text.replace('"name":"x"', '"name":"y"'))
    assert renamed != plan_digest(plan)


def test_reading_gives_back_the_plan_that_was_written(plan, tmp_path: Path):
    path = write_plan(plan, tmp_path / "new" / "plan.json")
    found = read_plan(path, prices=Prices())
    assert found == plan
    assert hash(found) == hash(plan)
    assert found.solver == plan.solver
    assert found.graph == plan.graph
    assert found.options[4].axis_options == plan.options[4].axis_options
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_a_file_holds_the_plans_of_several_parts(plan, tmp_path: Path):
    other = plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL))
    path = write_plans({"stage 0": plan, "stage 1": other}, tmp_path / "plans.json")
    assert read_plan(path, prices=Prices(), part="stage 0") == plan
    assert read_plan(path, prices=Prices(), part="stage 1") == other
    single = write_plan(plan, tmp_path / "plan.json")
    for file, part, message in (
        (path, "stage 2", f"{path} has no plan of stage 2; it has stage 0, stage 1"),
        (path, None, f"{path} has plans of the parts stage 0, stage 1, and none of a whole model"),
        (single, "stage 0", f"{single} has no plan of stage 0; it has the plan of a whole model"),
    ):
        with pytest.raises(PlanMismatchError) as error:
            read_plan(file, prices=Prices(), part=part)
        assert str(error.value) == message


def test_microbatches_are_read_back(tmp_path: Path):
    request = replace(REQUEST, microbatches=Microbatches(num_in_step=4, num_live=2))
    plan = plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL), request=request)
    path = write_plan(plan, tmp_path / "plan.json")
    assert read_plan(path, prices=Prices()).request == request


def test_the_same_plan_gives_the_same_bytes(plan, tmp_path: Path):
    first, second = write_plan(plan, tmp_path / "a"), write_plan(plan, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_white_space_may_change_and_nothing_else(plan, tmp_path: Path):
    path = write_plan(plan, tmp_path / "plan.json")
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document, indent=7))
    assert read_plan(path, prices=Prices()) == plan
    document["content"]["options"][0]["outputs"] = ["R R"]
    path.write_text(json.dumps(document))
    with pytest.raises(PlanMismatchError) as error:
        read_plan(path, prices=Prices())
    assert str(error.value) == (
        f"{path} was damaged or edited: its content does not have the digest it names; to change "
        "a plan, plan again with constraints"
    )


def test_a_cut_off_file_is_refused(plan, tmp_path: Path):
    path = write_plan(plan, tmp_path / "plan.json")
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:size])
        with pytest.raises(PlanMismatchError, match="is damaged or no plan"):
            read_plan(path, prices=Prices())


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"9" * 5_000, b'{"a": 1, "a": 2}', b'{"format": "\xff"}']
)
def test_a_document_that_is_no_strict_json_is_refused(text: bytes, tmp_path: Path):
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(PlanMismatchError, match="is damaged or no plan"):
        read_plan(tmp_path / "plan.json", prices=Prices())


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(OSError, match="it is no regular file"):
        read_plan(tmp_path / "plan.json", prices=Prices())


def test_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    for text in ("[]", "{}", '{"format": "x"}'):
        path.write_text(text)
        with pytest.raises(PlanMismatchError) as error:
            read_plan(path, prices=Prices())
        assert str(error.value) == f"{path} is no plan: its format is not 'gt-autoparallel plan'"


@pytest.mark.parametrize(("version", "age"), [(1, "an older"), (9, "another"), ("8", "another")])
def test_another_version_is_refused(plan, tmp_path: Path, version: object, age: str):
    path = write_plan(plan, tmp_path / "plan.json")
    document = json.loads(path.read_bytes())
    if version == 1:  # as it was
        del document["content"]["signature"]["modules"]
        document["sha256"] = hashlib.sha256(canonical_json(document["content"])).hexdigest()
    path.write_text(json.dumps({**document, "version": version}))
    with pytest.raises(PlanMismatchError) as error:
        read_plan(path, prices=Prices())
    assert str(error.value) == (
        f"{path} was written by {age} version of gt-autoparallel: its format version is "
        f"{version!r}, and 8 is read here; plan again"
    )


def test_a_file_has_the_fields_of_its_version(plan):
    """Whoever changes what a plan file holds changes ``FORMAT_VERSION`` too, and this list."""
    content = encode_plan(plan)
    parts = {
        "content": content,
        **{name: part for name, part in content.items() if isinstance(part, dict)},
        **{name: content[name][0] for name in ("options", "redistributions", "windows")},
        "node": content["graph"]["nodes"][0],
        "constraint": content["request"]["constraints"][0],
        "step": content["redistributions"][0]["steps"][0],
    }
    assert FORMAT_VERSION == 8
    assert {name: " ".join(sorted(part)) for name, part in parts.items()} == {
        "content": "compute_us graph judgement memory mesh options prices_digest recomputed redistributions "
        "replicated_nodes request signature solver windows",
        "constraint": "node placements position side",
        "graph": "nodes parameter_aliases",
        "memory": "gathered_ahead gradients gradients_before in_flight let_go_at_reduction "
        "let_go_in_backward loss optimizer_state parameters recomputed saved_activations "
        "to_come_at_reduction to_come_in_backward",
        "mesh": "names sizes strides",
        "node": "args kind kwargs module name outputs phase target",
        "options": "by_rule operands outputs",
        "redistributions": "again consumer hidden_us in_full_us position steps window",
        "request": "accumulates_gradients constraints loss_bytes memory_budget_bytes microbatches "
        "optimizer_state_copies recomputes replicate_unknown",
        "signature": "graph_digest modules parameters",
        "solver": "lower_bound_us memory_price_us_per_gib method num_nodes num_options "
        "num_variables objective_us proven seconds",
        "step": "axis input_shape kind output_shape source_dim target_dim",
        "windows": "communication_us compute_us name",
    }


def test_fields_that_no_plan_has_are_refused(plan, tmp_path: Path):
    path = write_plan(plan, tmp_path / "plan.json")
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "note": "mine"}))
    with pytest.raises(PlanMismatchError) as error:
        read_plan(path, prices=Prices())
    assert str(error.value) == f"{path} has fields that no plan has: note"

    content = document["content"]
    content["speed"] = "high"
    content["redistributions"][0]["steps"][0]["kind"] = "all_gather"
    content["options"][2]["recompute"] = True
    document["sha256"] = hashlib.sha256(canonical_json(content)).hexdigest()
    path.write_text(json.dumps(document))
    with pytest.raises(PlanMismatchError) as error:
        read_plan(path, prices=Prices())
    assert str(error.value) == (
        f"{path} has fields that no plan has: content.options[2].recompute, content.speed"
    )


def places(content, at=()):
    """Where values stand in a file's content, those inside of others too."""
    yield at
    if isinstance(content, (dict, list)):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(value, (*at, key))


def with_value(document, at, value):
    """A copy of a plan's document with another value somewhere, and the digest of that."""
    changed = copy.deepcopy(document)
    holder = changed
    for key in ("content", *at)[:-1]:
        holder = holder[key]
    holder[("content", *at)[-1]] = value
    changed["sha256"] = hashlib.sha256(canonical_json(changed["content"])).hexdigest()
    return changed


def test_whatever_stands_in_a_file_is_read_or_refused(planned, tmp_path: Path):
    """A digest that is right proves no more than that somebody wrote it."""
    _, (path, *of_model) = planned
    document = json.loads(path.read_bytes())
    other = tmp_path / "other.json"
    num_refused = 0
    values = itertools.cycle(("x", 7, [], {}, [7]))
    everywhere = [at for at in places(document["content"]) if at]
    for at in everywhere:
        for value in (None, next(values)):
            other.write_text(json.dumps(with_value(document, at, value)))
            try:
                check_plan_file(other, *of_model)
            except PlanMismatchError:
                num_refused += 1
    assert num_refused > 500


@pytest.mark.parametrize(
    ("at", "value", "problem"),
    [
        (
            ("request", "loss_bytes"),
            None,
            "ResolvedRequest: loss_bytes is None; allowed: int",
        ),
        (
            ("memory", "parameters"),
            2.5,
            "MemoryBreakdown: parameters is 2.5; allowed: int",
        ),
        (
            ("request", "memory_budget_bytes"),
            "x",
            "ResolvedRequest: memory_budget_bytes is 'x'; allowed: int or NoneType",
        ),
        (("graph", "nodes", 0, "outputs"), [], "node 'weight' is of kind 'parameter' and makes no tensor"),
        (("recomputed",), ["x"], "the plan's content cannot be read: KeyError: 'x'"),
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_named(planned, tmp_path: Path, at, value, problem):
    _, (path, *_) = planned
    other = tmp_path / "other.json"
    other.write_text(json.dumps(with_value(json.loads(path.read_bytes()), at, value)))
    with pytest.raises(PlanMismatchError) as error:
        read_plan(other, prices=PlacementPrices())
    assert str(error.value) == f"{other}: {problem}"


def test_parts_that_cannot_be_read_are_refused(plan, tmp_path: Path):
    path = write_plans({"stage0": plan}, tmp_path / "plans.json")
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(with_value(document, ("parts", "stage0", "signature"), {})))
    with pytest.raises(PlanMismatchError) as error:
        tensors_of_parts(path)
    assert str(error.value) == (
        f"{path}: the plans' content cannot be read: KeyError: 'parameters'"
    )


# ---- for a model, before and after it is captured ------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of a small model on disk, with the arguments with which it is loaded."""
    model, mesh = torch.nn.Linear(8, 8), MeshShape(names=("dp",), sizes=(2,))
    found = find_placement(model, mesh, (torch.empty(4, 8),))
    path = write_plan(found, tmp_path_factory.mktemp("plans") / "plan.json")
    return found, (path, model, mesh, (torch.empty(4, 8),))


def test_a_plan_that_keeps_what_is_demanded_is_loaded_with_the_way_the_model_is_called(planned):
    found, arguments = planned
    (x,) = found.graph.of_kind("input")
    demands = {
        "constraints": Constraints(inputs={"input": found.options[x.index].output()}),
        "memory_budget_bytes": found.memory.total,
    }
    assert check_plan_file(*arguments, **demands) == found
    loaded = load_plan(*arguments, **demands)
    assert loaded == found
    assert loaded.graph.interface is not None


def test_names_inputs_that_are_others_without_capturing_the_model(planned):
    _, (path, model, mesh, _) = planned
    with pytest.raises(PlanMismatchError) as error:
        check_plan_file(path, model, mesh, (torch.empty(6, 8, dtype=torch.bfloat16),))
    assert str(error.value) == (
        "the plan was made for something else; plan again:\n"
        "  - input input is bfloat16[6, 8], planned for float32[4, 8]"
    )
    with pytest.raises(PlanMismatchError, match="the model is not called as in the example inputs"):
        check_plan_file(path, model, mesh, ())


def test_names_everything_that_is_demanded_and_not_kept(planned):
    found, arguments = planned
    demands = {
        "constraints": Constraints(inputs={"*": [S1]}, parameters={"bias": [S1]}),
        "memory_budget_bytes": 10,
    }
    with pytest.raises(PlanMismatchError) as error:
        check_plan_file(*arguments, **demands)
    assert "bias" in str(error.value)  # which has no dim 1
    demands["constraints"] = Constraints(inputs={"*": [S1]})
    layout = found.options[found.graph.of_kind("input")[0].index].output()
    with pytest.raises(PlanMismatchError) as error:
        check_plan_file(*arguments, **demands)
    assert str(error.value) == (
        "the plan was made for something else; plan again:\n"
        f"  - input input is {short_text(layout)} along dp, and S(1) is demanded\n"
        f"  - it takes {found.memory.total:,} bytes of memory on each rank, and 10 are allowed"
    )


def test_names_what_of_a_step_takes_other_memory_than_was_planned_for(planned):
    found, arguments = planned
    budget = found.request.memory_budget_bytes
    assert check_plan_file(*arguments, made_for_budget_bytes=budget) == found
    step = {
        "made_for_budget_bytes": budget - 1,
        "optimizer_state_copies": 0,
        "accumulates_gradients": True,
    }
    for read in (check_plan_file, load_plan):
        with pytest.raises(PlanMismatchError) as error:
            read(*arguments, **step)
        assert str(error.value) == (
            "the plan was made for something else; plan again:\n"
            "  - several microbatches add up gradients, planned for a run in which each step makes "
            "new gradients\n"
            "  - the optimizer's state is 0 times the parameters' bytes, planned for 2 times\n"
            f"  - the memory budget is {budget - 1:,} bytes on each rank, planned for "
            f"{budget:,} bytes"
        )


def test_names_a_loss_that_takes_something_else_where_all_else_agrees(planned):
    _, arguments = planned
    with pytest.raises(PlanMismatchError) as error:
        check_plan_file(*arguments, loss_bytes=512)
    assert str(error.value) == (
        "the plan was made for something else; plan again:\n"
        "  - the loss takes 512 bytes, planned for 0"
    )


def test_an_axis_of_one_rank_is_another_mesh(planned):
    _, (path, model, _, inputs) = planned
    mesh = MeshShape(names=("dp", "tp"), sizes=(2, 1))
    with pytest.raises(PlanMismatchError) as error:
        check_plan_file(path, model, mesh, inputs)
    assert str(error.value) == (
        "the plan was made for something else; plan again:\n"
        "  - mesh is dp 2 x tp 1, planned for dp 2"
    )


def test_other_prices_are_refused(plan, tmp_path: Path):
    path = write_plan(plan, tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError) as error:
        read_plan(path, prices=Prices(us_per_node=3.0))
    assert str(error.value) == (
        f"{path}: the plan was made with other prices: digest 'double 0.001 1.0', those given "
        "have 'double 0.001 3.0'; give the cost model it was made with, or plan again"
    )


def test_a_file_is_replaced_whole_or_not_at_all(plan, tmp_path: Path, monkeypatch):
    path = write_plan(plan, tmp_path / "plan.json")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_plan(replace(plan, replicated_nodes=("mm0",)), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_fits_the_model_and_mesh_it_was_made_for(plan):
    check_plan_fits(plan, model=TwoLayers(), mesh=plan.mesh, graph=two_layer_graph())


def test_names_everything_in_which_model_and_mesh_differ(plan):
    model = TwoLayers().to(torch.bfloat16)
    model.layers[1] = torch.nn.Linear(8, 8)
    mesh = MeshShape(names=("dp", "tp"), sizes=(2, 4))
    with pytest.raises(PlanMismatchError) as error:
        check_plan_fits(plan, model=model, mesh=mesh, graph=two_layer_graph())
    assert str(error.value) == (
        "the plan was made for something else; plan again:\n"
        "  - mesh is dp 2 x tp 4, planned for dp 2 x tp 2\n"
        "  - layers.0.weight is bfloat16[16, 16], planned for float32[16, 16]\n"
        "  - layers.1.weight is float32[8, 8], planned for float32[16, 16]\n"
        "  - layers.1.bias was not planned"
    )


def test_names_the_nodes_in_which_graphs_differ(plan):
    graph = two_layer_graph()
    nodes = tuple(
        replace(node, module="layers.7") if node.name == "mm0" else node for node in graph.nodes
    )
    changed = replace(graph, nodes=nodes[:-1], parameter_aliases={"tied.weight": "p0"})
    with pytest.raises(PlanMismatchError) as error:
        check_plan_fits(plan, model=TwoLayers(), mesh=plan.mesh, graph=changed)
    assert str(error.value) == (
        "the plan was made for something else; plan again:\n"
        "  - node 'mm0': module is 'layers.7', planned for 'layers.0'\n"
        "  - 18 nodes, planned for 19\n"
        "  - tied parameters are {'tied.weight': 'p0'}, planned for {}"
    )
