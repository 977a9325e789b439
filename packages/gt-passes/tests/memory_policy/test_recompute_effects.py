"""Steps with writes and effects that must happen as often, and in the order, as in eager."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import capture, node_of
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from gt_config import CompileConfig
from gt_config.node_keys import PhaseAnnotation
from gt_passes import optimize
from gt_passes.analysis.storages import Storages
from gt_passes.memory_policy.recomputability import Recomputability
from gt_trace import trace_step
from gt_trace.node_metadata import write_annotation

_log: list[str] = []
_library = torch.library.Library("gt_test_effects", "DEF")
_pure = (torch.Tag.pointwise,)


def _define(schema: str, run: object, fake: object, **options: object) -> object:
    name = schema.partition("(")[0]
    _library.define(schema, **options)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gt_test_effects::{name}", fake, lib=_library)
    return getattr(torch.ops.gt_test_effects, name).default


def _scale(x, out):
    out.copy_(x * 3.0)


def _update(x, a, b):
    a.copy_(x * 2.0)
    b.add_(x)


def _add_and_return(x, out):
    out.add_(x)
    return x * out


def _note(x):
    _log.append("noted")
    return x * 1.5


def _nothing(*_):
    return None


scale_into = _define("scale_into(Tensor x, Tensor(a!) out) -> ()", _scale, _nothing)
pure_scale_into = _define(
    "pure_scale_into(Tensor x, Tensor(a!) out) -> ()", _scale, _nothing, tags=_pure
)
update = _define("update(Tensor x, Tensor(a!) a, Tensor(b!) b) -> ()", _update, _nothing)
add_and_return = _define(
    "add_and_return(Tensor x, Tensor(a!) out) -> Tensor",
    _add_and_return,
    lambda x, out: torch.empty_like(x),
)
noted = _define("noted(Tensor x) -> Tensor", _note, torch.empty_like, tags=_pure)
torch.library.register_autograd("gt_test_effects::noted", lambda _, grad: grad * 1.5, lib=_library)
_register_effectful_op(noted, _EffectType.ORDERED)


def one_buffer(layer, y):
    buffer = torch.zeros_like(y)
    scale_into(y.detach(), buffer)
    return (y * buffer).sigmoid()


def pure_writer(layer, y):
    buffer = torch.zeros_like(y)
    pure_scale_into(y.detach(), buffer)
    return (y * buffer).sigmoid()


def two_buffers(layer, y):
    first, second = torch.zeros_like(y), torch.ones_like(y)
    update(y.detach(), first, second)
    return (y * first * second).sigmoid()


def part_of_a_buffer(layer, y):
    buffer = torch.zeros(2, *y.shape)
    scale_into(y.detach(), buffer[1])
    return (y * buffer[1] + buffer.sum(0)).sigmoid()


def in_place_on_a_part(layer, y):
    buffer = torch.zeros_like(y)
    buffer[:, 2:].add_(y[:, 2:].detach())
    return (y * buffer).sigmoid()


def writers_that_read_each_other(layer, y):
    first, second = torch.zeros_like(y), torch.zeros_like(y)
    scale_into(y.detach(), first)
    scale_into(first, second)
    scale_into(second, first)
    return (y * first * second).sigmoid()


def list_of_buffers(layer, y):
    first, second = torch.zeros_like(y), torch.ones_like(y)
    torch._foreach_add_([first, second], [y.detach(), y.detach()])
    return (y * first * second).sigmoid()


def out_argument(layer, y):
    buffer = torch.zeros_like(y)
    torch.mul(y.detach(), 2.0, out=buffer)
    return (y * buffer).sigmoid()


def written_and_returned(layer, y):
    buffer = torch.zeros_like(y)
    result = add_and_return(y.detach(), buffer)
    return (y * buffer * result).sigmoid()


def ordered_effects(layer, y):
    y = noted(y)
    return (y * noted(y.sigmoid())).sigmoid()


def running_statistics(layer, y):
    y = layer.norm(y)
    return (y * y).sigmoid()


def buffer_of_the_model(layer, y):
    scale_into(y.detach().mean(0), layer.norm.running_mean)
    return (y * layer.norm.running_mean).sigmoid()


class Layer(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.inner, self.outer, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.outer(self.compute(self, self.inner(x)))


class Model(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.layers = nn.ModuleList(Layer(compute) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def results(compute, policy: str | None) -> list[object]:
    """Return what a step of eager (without a policy), or of a captured step, gives and leaves."""
    torch.manual_seed(0)
    model, x = Model(compute), torch.randn(4, 8)

    def step(x):
        loss = model(x).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    run = step
    if policy is not None:
        traced = trace_step(step, module=model)(x)
        assert optimize(traced, CompileConfig(memory_policy=policy)).verified
        run = traced.bind(model)
    _log.clear()
    loss, gradients = run(x)
    return [loss, *gradients, *model.buffers(), list(_log)]


@pytest.mark.parametrize("policy", ["selective", "full_recompute", "offload"])
@pytest.mark.parametrize(
    "compute",
    [
        *(one_buffer, pure_writer, two_buffers, part_of_a_buffer, in_place_on_a_part),
        *(writers_that_read_each_other, list_of_buffers, out_argument, written_and_returned),
        *(ordered_effects, running_statistics, buffer_of_the_model),
    ],
)
def test_a_memory_policy_runs_effects_as_often_as_eager(compute, policy):
    for expected, got in zip(results(compute, None), results(compute, policy), strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(got, expected)
        else:
            assert got == expected


def _reasons(fn, *names: str) -> list[str | None]:
    graph_module = capture(fn, torch.ones(4, 8))
    (output,) = graph_module.graph.find_nodes(op="output")
    write_annotation(output.prev, PhaseAnnotation(phase="backward"))
    storages = Storages(graph_module)
    recomputability = Recomputability(storages)
    nodes = (node_of(graph_module, name) for name in names)
    return [recomputability.reason_against(storages.of(node)[0]) for node in nodes]


def test_says_why_a_buffer_is_kept_that_an_operator_without_a_result_fills():
    def fill(x):
        buffer = torch.zeros_like(x)
        scale_into(x, buffer)
        return buffer.exp()

    def fill_purely(x):
        buffer = torch.zeros_like(x)
        pure_scale_into(x, buffer)
        return buffer.exp()

    (reason,) = _reasons(fill, "zeros_like")
    assert reason == "scale_into: nobody says that gt_test_effects.scale_into is pure"
    (reason,) = _reasons(fill_purely, "zeros_like")
    assert reason == "pure_scale_into writes to memory that others read before"


def test_says_why_results_of_operators_with_effects_are_kept():
    def run(x):
        mean, var = torch.zeros(8), torch.ones(8)
        torch.nn.functional.batch_norm(x, mean, var, training=True)
        normal = torch.nn.functional.batch_norm(x, mean, var, training=True)
        return noted(x), normal, mean.exp()

    effect, statistics = _reasons(run, "noted", "native_batch_norm_1")
    assert effect == "gt_test_effects.noted has an effect"
    assert statistics == "it also writes to zeros"
