"""A stamped capture is the full one, in everything that a pass or a run can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stamp_models import VOCABULARY, WIDTH, Block, Toy, differences, stamp, step_of, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from gt_trace._torch_internals import DTensorSpec
from gt_trace.errors import CaptureError
from gt_trace.stamping import trace_by_stamping, trace_step_by_stamping
from gt_trace.stamping.report import StampingError
from gt_trace.testing import fake_world


class Keyed(Toy):
    """A numbered ModuleDict, as torchtitan's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(self.layers)})

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class FromTheMiddle(Keyed):
    """Layers that keep the numbers which they have in a model of more, as a pipeline's stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(9 + i): layer for i, layer in self._numbered()})

    def _numbered(self) -> Any:
        return enumerate(self.layers.values())


class Alternating(Toy):
    """Layers of two kinds by turns."""

    def __init__(self) -> None:
        super().__init__(num_layers=10)
        for layer in self.layers[1::2]:
            layer.activation = nn.GELU()


class DenseFirst(Toy):
    """A layer of another kind before the repeated ones."""

    def __init__(self) -> None:
        super().__init__(num_layers=6)
        self.layers[0] = Block(hidden=8)


class SharedTable(Toy):
    """One buffer that all layers hold."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(1)
        for layer in self.layers:
            layer.gain = table


class Checkpointed(Toy):
    """Layers that the backward runs again, as a whole."""

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Rotary(Block):
    """Complex views, whose gradients are conjugates."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.up(x).unflatten(-1, (-1, 2)))
        turned = turned * torch.view_as_complex(torch.ones(3, 2))
        return x + self.down(torch.view_as_real(turned).flatten(-2))


class Counted(Block):
    """A size that only the run will tell, for each layer its own."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[0, :, 0] > 0).nonzero().squeeze(-1)
        return x + self.down(self.up(x[0].index_select(0, rows))).sum(0)


class CountedThrice(Block):
    """Three sizes that only the run will tell, and their sum."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([(x[0, :, i] > 0).nonzero().squeeze(-1) for i in range(3)])
        return x + self.down(self.up(x[0].index_select(0, rows))).sum(0)


class InPlace(Block):
    """A buffer that counts, and a view that is written to."""

    def forward(self, x: Tensor) -> Tensor:
        self.gain.add_(1)
        y = self.down(self.up(x)).clone()
        y.view(-1).mul_(2)
        return x + y


class Views(Block):
    """A layer whose result is a view, so that memory crosses its end."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x))).transpose(0, 1).transpose(0, 1)


class FromTheStart(Toy):
    """Every layer reads what the first one did."""

    def __init__(self) -> None:
        super().__init__(num_layers=7)

    def run_layers(self, x: Tensor) -> Tensor:
        begin = x
        for layer in self.layers:
            x = layer(x) + begin
        return x


class TwoBack(Toy):
    """The projection reads a value from two layers back."""

    def __init__(self) -> None:
        super().__init__(num_layers=7)

    def run_layers(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self.layers:
            results.append(layer(results[-1]))
        return results[-1] + results[-3]


class Unused(Block):
    """A parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))


class Dropped(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)


MODELS: dict[str, tuple[Callable[[], Toy], int]] = {
    "ModuleList of 5": (lambda: Toy(5), 4),
    "ModuleDict": (Keyed, 4),
    "from the middle": (FromTheMiddle, 4),
    "two kinds by turns": (Alternating, 8),
    "another kind before": (DenseFirst, 5),
    "tied embedding": (lambda: Toy(tied=True), 4),
    "shared buffer": (SharedTable, 4),
    "checkpointed": (Checkpointed, 4),
    "dropout": (lambda: Toy(block=Dropped), 4),
    "complex views": (lambda: Toy(block=Rotary), 4),
    "sizes at run time": (lambda: Toy(7, block=Counted), 4),
    "sums of sizes at run time": (lambda: Toy(7, block=CountedThrice), 4),
    "writes in place": (lambda: Toy(block=InPlace), 4),
    "views at the end of a layer": (lambda: Toy(block=Views), 4),
    "value from the start": (FromTheStart, 6),
    "value from two layers back": (TwoBack, 6),
    "parameter without gradient": (lambda: Toy(block=Unused), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_stamped_capture_is_the_full_one(name: str) -> None:
    build, num_traced = MODELS[name]
    model = build()
    captured = stamp(model)
    assert captured.report.refusal is None
    assert captured.report.num_layers_traced == num_traced
    assert differences(model, captured) == []
    check_nothing_mutable_is_shared(captured.step.graph_module.graph)


def check_nothing_mutable_is_shared(graph: torch.fx.Graph) -> None:
    """A pass that edits one node's metadata edits no other's."""
    nodes = list(graph.nodes)
    held: list[Any] = [node.meta for node in nodes]
    for key in ("custom", "unbacked_bindings", "eager_input_vals", "val"):
        values = [node.meta[key] for node in nodes if key in node.meta]
        held.extend(each for each in values if isinstance(each, dict | list))
    assert len({id(each) for each in held}) == len(held)


def test_stamped_step_computes_what_eager_does() -> None:
    torch.manual_seed(0)
    model = Toy(7)
    captured = stamp(model)
    assert captured.report.stamped
    batch = torch.randint(0, VOCABULARY, (2, 3))
    loss, gradients = captured.step.bind(model)(batch)
    expected_loss, expected = step_of(model)(batch)
    assert torch.equal(loss, expected_loss)
    assert len(gradients) == len(expected)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_forward_without_gradients_is_stamped() -> None:
    model = Toy()

    def forward(batch: Tensor) -> Tensor:
        with torch.no_grad():
            return model(batch)

    captured = stamp(model, forward)
    assert captured.report.refusal is None
    assert differences(model, captured, forward) == []


def test_model_is_as_it_was_afterwards() -> None:
    model = Toy()
    before = [(name, id(module), vars(module).copy()) for name, module in model.named_modules()]
    state = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    stamp(model)
    after = [(name, id(module), vars(module)) for name, module in model.named_modules()]
    assert [each[:2] for each in after] == [each[:2] for each in before]
    assert [each[2].keys() for each in after] == [each[2].keys() for each in before]
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == state
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_comparing_says_so_in_the_report() -> None:
    model = Toy(5)
    captured = trace_step_by_stamping(step_of(model), module=model, compare=True)(tokens())
    assert captured.report.compared
    assert str(captured.report) == (
        "4 of 5 layers traced, the others stamped, equal to the full trace"
    )


def test_comparing_raises_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_by_stamping, "step_differences", lambda *_: ["names: a and b"])
    model = Toy(5)
    with pytest.raises(StampingError) as caught:
        trace_step_by_stamping(step_of(model), module=model, compare=True)(tokens())
    assert str(caught.value) == ("the stamped capture differs from the full one:\n  names: a and b")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Embedding(VOCABULARY, WIDTH)), "the model has no ModuleList"),
        (Toy(4), "of 4 layers, no more than 4 that are alike repeat in a row"),
    ],
    ids=["no list", "four layers"],
)
def test_model_with_nothing_to_stamp_is_traced_in_full(model: nn.Module, reason: str) -> None:
    captured = stamp(model)
    assert captured.report.refusal is not None
    assert reason in captured.report.refusal
    assert str(captured.report).startswith(f"all {captured.report.num_layers} layers traced: ")


def test_attributes_that_no_forward_reads_may_differ() -> None:
    model = Toy(5)
    for index, layer in enumerate(model.layers):
        layer.initial_scale = 1 / (index + 1)
    captured = trace_step_by_stamping(
        step_of(model), module=model, ignored_attributes=frozenset({"initial_scale"})
    )(tokens())
    assert captured.report.stamped


def test_layouts_are_compared_without_the_hash_that_one_of_them_remembers() -> None:
    with fake_world(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        model = Toy()
        for layer in model.layers:
            layer.layout = DTensorSpec(mesh, (Shard(0),))
        hash(model.layers[3].layout)
        assert stamp(model).report.stamped
        model.layers[3].layout = DTensorSpec(mesh, (Shard(1),))
        refusal = stamp(model).report.refusal
    assert refusal is not None
    assert "layers.3.layout.shard_order[0][0] is 1, and 0 in layers.0" in refusal


def test_gradient_hook_on_a_layer_that_is_not_traced_is_refused() -> None:
    model = Toy()
    model.layers[3].up.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CaptureError, match=r"parameter layers\.3\.up\.weight has a hook"):
        stamp(model)


class HookedLate(Toy):
    """Its first call installs a hook on every layer, when the layers have run."""

    def __init__(self, hook: Callable[..., Tensor | None]) -> None:
        super().__init__(num_layers=8)
        self.hook = hook

    def run_layers(self, x: Tensor) -> Tensor:
        hidden: Tensor = super().run_layers(x)
        for layer in self.layers:
            if not layer._forward_hooks:
                layer.register_forward_hook(self.hook)
        return hidden


def _twice(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 2


def _look(_module: nn.Module, _inputs: tuple[Tensor, ...], _output: Tensor) -> None:
    pass


# With a hook that changes what a layer computes, the model's first call is another than its second.
@pytest.mark.parametrize(("hook", "is_stamped"), [(_look, True), (_twice, False)])
def test_hooks_that_the_first_call_installs_are_part_of_the_step(
    hook: Callable[..., Tensor | None], is_stamped: bool
) -> None:
    module = HookedLate(hook)
    found = stamp(module)
    assert found.report.stamped == is_stamped
    assert len(found.step.mode.num_hooks) == 8
    loss, gradients = found.step.bind(module)(tokens())
    expected_loss, expected = step_of(module)(tokens())
    assert torch.equal(loss, expected_loss)
    assert all(map(torch.equal, gradients, expected))
