"""The captured graph computes what the model computes, and says what cannot be captured."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from global_run import run_globally
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree

from gt_autoparallel.errors import UnsupportedModelError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.placement_graph import PlacementGraph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Tied weights, repeated layers, a buffer, several outputs, one of them a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, tokens: torch.Tensor, *, flags: dict[str, Any]) -> dict[str, Any]:
        h = self.embedding(tokens) * self.scale * self.frozen
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return {
            "logits": logits,
            "flat": logits.view(-1, 12),
            "square": h * h if flags["square"] else h,
            "tokens": tokens,
            "name": "tied",
        }


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        h[:, :2].mul_(2.0)
        h = h + 1.0
        h.add_(1.0)
        return F.relu_(h)


class Normalized(nn.Module):
    """Its normalization adds epsilon to a mean that nobody else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.linear(x))
        return h.sin().mul_(2.0)


class WritesUnderView(nn.Module):
    """What is written was made a view of before, and saved for the backward of what reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.weight
        row = h[0]
        h.mul_(2.0)
        return h * row.sin()


class WritesPower(nn.Module):
    """``aten.pow_.Scalar`` on a tensor that nobody else holds: ``aten.pow.Scalar`` takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * (self.scale * 2.0).pow_(2.0)
        return y


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x), labels)


def tensors_of(
    model: nn.Module, graph: PlacementGraph, args: Any, tangents: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    assert graph.interface is not None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = pytree.tree_leaves(args)
    for leaf, value in zip(graph.interface.inputs, leaves, strict=True):
        if leaf.node is not None:
            tensors[graph.nodes[leaf.node].name] = value
    given = iter(tangents)
    for output in graph.interface.outputs:
        if output.tangent is not None:
            tensors[graph.nodes[output.tangent].name] = next(given)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_same_as_eager(model: nn.Module, *args: Any, **kwargs: Any) -> PlacementGraph:
    """Outputs and every gradient, bit by bit."""
    on_meta = pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )
    graph = capture_placement_graph(model, on_meta[0], on_meta[1])
    outputs = [o for o in pytree.tree_leaves(model(*args, **kwargs)) if torch.is_tensor(o)]
    differentiable = [output for output in outputs if output.requires_grad]
    torch.manual_seed(1)
    tangents = [torch.randn_like(output) for output in differentiable]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        differentiable, list(trained.values()), tangents, allow_unused=True
    )
    result = run_globally(graph, tensors_of(model, graph, (args, kwargs), tangents))
    for got, wanted in zip(result.outputs.values(), outputs, strict=True):
        assert torch.equal(got, wanted)
    expected = {
        name: gradient
        for name, gradient in zip(trained, gradients, strict=True)
        if gradient is not None
    }
    assert result.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(result.gradients[name], gradient), name
    return graph


@pytest.fixture(scope="module")
def tied() -> PlacementGraph:
    torch.manual_seed(0)
    return assert_same_as_eager(Tied(), torch.arange(6).view(2, 3), flags={"square": True})


def test_tied_weights_views_and_several_outputs_as_in_eager(tied: PlacementGraph) -> None:
    assert tied.parameter_aliases == {"head.weight": "embedding.weight"}
    assert tied.interface is not None
    assert [(o.name, o.constant) for o in tied.interface.outputs][-1] == ("output['name']", "tied")
    assert [o.tangent is None for o in tied.interface.outputs] == [False, False, False, True, True]
    assert [leaf.name for leaf in tied.interface.inputs] == ["tokens", "flags['square']"]


def test_arguments_come_first_and_names_are_unique(tied: PlacementGraph) -> None:
    assert all(use.value.node < use.consumer for use in tied.uses)
    assert len({node.name for node in tied.nodes}) == len(tied.nodes)
    assert [node.index for node in tied.nodes] == list(range(len(tied.nodes)))


def test_every_value_has_one_use_but_those_of_share_nodes(tied: PlacementGraph) -> None:
    counts = Counter(use.value for use in tied.uses)
    several = {value.node for value, count in counts.items() if count > 1}
    assert several
    assert all(tied.nodes[node].kind == "share" for node in several)


def test_each_parameter_that_is_read_is_read_by_its_share_node(tied: PlacementGraph) -> None:
    readers = {use.value.node: tied.nodes[use.consumer].kind for use in tied.uses}
    for node in tied.of_kind("parameter"):
        assert readers.get(node.index) == (None if node.name == "unused" else "share")


def test_layers_name_their_nodes(tied: PlacementGraph) -> None:
    names = [node.name for node in tied.nodes if node.module == "layers.1.up"]
    assert names == [
        "layers.1.up.weight",
        "layers.1.up.weight/share",
        "layers.1.up/t",
        "layers.1.up/t/share",
        "layers.1.up/view",
        "layers.1.up/view/share",
        "layers.1.up/mm",
        "layers.1.up/view_1",
        "layers.1.up/view_1/share",
        *(name for name in names if "/grad/" in name),
        "layers.1.up.weight/gradient",
    ]


def test_writes_become_new_values() -> None:
    torch.manual_seed(0)
    assert_same_as_eager(InPlace(), torch.randn(3, 4))


def test_a_write_to_what_nobody_else_holds_needs_no_second_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    graph = assert_same_as_eager(Normalized(), torch.randn(3, 4))
    names = [node.name for node in graph.nodes]
    assert "norm/add" in names
    assert "mul" in names

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("gt_autoparallel.graph.capture.make_fx", refuse)
    capture_placement_graph(Normalized(), (torch.randn(3, 4),))
    with pytest.raises(AssertionError, match="traced again"):
        capture_placement_graph(WritesUnderView(), (torch.randn(3, 4),))


def test_a_write_whose_namesake_takes_something_else_becomes_a_new_value() -> None:
    torch.manual_seed(0)
    graph = assert_same_as_eager(WritesPower(), torch.randn(3, 4))
    assert "aten.pow.Tensor_Scalar" in {str(node.target) for node in graph.nodes}


def test_a_write_under_a_view_is_seen_through_it() -> None:
    torch.manual_seed(0)
    assert_same_as_eager(WritesUnderView(), torch.randn(3, 4))


def test_a_loss_in_the_model_keeps_its_gradient() -> None:
    torch.manual_seed(0)
    graph = assert_same_as_eager(Loss(), torch.randn(5, 4), torch.tensor([1, 2, 3, 4, 5]))
    on_meta = Loss().to("meta")
    again = capture_placement_graph(on_meta, (torch.empty(5, 4), torch.empty(5, dtype=torch.int64)))
    assert again == graph


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * self.weight
        return self.weight, y, y, self.weight.t()


def test_parameters_and_the_same_value_twice_may_be_returned() -> None:
    assert_same_as_eager(ReturnsParameter(), torch.randn(2, 3))


def test_casts_of_parameters_are_what_is_shared() -> None:
    model = Block().to("meta")
    graph = capture_placement_graph(
        model, (torch.empty(4, 8, dtype=torch.bfloat16),), compute_dtype=torch.bfloat16
    )
    by_name = {node.name: node for node in graph.nodes}
    cast = by_name["up/_to_copy"]
    assert cast.operands[0].node == by_name["up.weight"].index
    assert by_name["up/_to_copy/share"].operands[0].node == cast.index
    gradient = by_name["up.weight/gradient"]
    reduced = graph.nodes[gradient.operands[0].node]
    assert [spec.dtype for spec in reduced.outputs if spec] == [torch.float32]
    assert graph.spec(reduced.operands[0]).dtype == torch.bfloat16
    low = capture_placement_graph(
        model,
        (torch.empty(4, 8, dtype=torch.bfloat16),),
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
    )
    (gradient,) = [node for node in low.nodes if node.name == "up.weight/gradient"]
    cast = low.nodes[gradient.operands[0].node]
    assert low.nodes[cast.operands[0].node].kind == "share"


class WritesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return self.linear(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.5)


class LooksUpItsOwn(nn.Module):
    """FlexAttention under a score function with numbers of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * torch.tensor([1.0, 2.0])[h]

        out: Any = flex_attention(x, x, x, score_mod=score)
        return out


class ChoosesBranch(nn.Module):
    """Another operator of operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return out


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (
            WritesBuffer(),
            (torch.empty(2, 4),),
            (
                "the forward writes to what belongs to the model or its caller, which a placed model "
                "could not do on its shards; return the new values instead: buffer count"
            ),
        ),
        (
            Drops(),
            (torch.empty(2, 4),),
            (
                "the model cannot be planned:\n"
                "  aten.bernoulli: draws random numbers, and must draw the same on every rank; seed "
                "all ranks alike and allow it by name (replicate_unknown=), or switch it off (first "
                "in the model, at test_capture.py:N: 'return F.dropout(self.linear(x), 0.5)')"
            ),
        ),
        (
            LooksUpItsOwn(),
            (torch.empty(2, 2, 4, 2),),
            (
                "the model cannot be planned:\n"
                "  higher_order.flex_attention: a function in it holds a tensor of its own; pass it "
                "as an argument or buffer (first in the model, at test_capture.py:N: 'out: Any = flex_attention(x, x, "
                "x, score_mod=score)')"
            ),
        ),
        (
            ChoosesBranch(),
            (torch.empty(2, 4),),
            (
                "the model cannot be planned:\n"
                "  higher_order.cond: operators of operators have no placement rule, but for "
                "FlexAttention (first in the model, at test_capture.py:N: 'out: torch.Tensor = "
                "torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))')"
            ),
        ),
        (
            InPlace(),
            ({"x": [torch.empty(2, 4), object()]},),
            (
                "example inputs of InPlace cannot be captured:\n"
                "  args[0]['x'][1] is a object; allowed: tensors, None, numbers, strings, and "
                "containers of them"
            ),
        ),
    ],
)
def test_refusals_say_why(model: nn.Module, args: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        capture_placement_graph(model.to("meta"), args)
    assert re.sub(r"(test_capture.py):\d+", r"\1:N", str(error.value)) == message


def test_refuses_an_assignment_to_the_data_of_a_parameter() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(UnsupportedModelError, match="parameter weight is given other memory"):
        capture_placement_graph(Clipped(4, 4), (torch.ones(2, 4),))


def test_refuses_control_flow_on_data() -> None:
    with pytest.raises(UnsupportedModelError, match="needs the value of a tensor"):
        capture_placement_graph(Branches().to("meta"), (torch.empty(2, 4),))


def test_refuses_a_call_that_fails() -> None:
    with pytest.raises(UnsupportedModelError, match="InPlace cannot be captured: its forward"):
        capture_placement_graph(InPlace().to("meta"), (torch.empty(2, 5),))
