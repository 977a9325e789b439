"""Two graphs in place of a module: the numbers, the history and the errors are the module's."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joint_models import Chosen, Dropping, Gelu, ManyNames, Tree
from torch import nn
from trace_models import TiedModel, batch

from gt_trace import InputMismatchError, StateMismatchError
from gt_trace.joint import export_joint_graph, partition
from gt_trace.joint.bound_joint import BoundJoint

PARTITIONERS = ("min_cut", "save_all")


def bind(module: nn.Module, *args: Any, partitioner: str = "min_cut", **kwargs: Any) -> BoundJoint:
    joint = export_joint_graph(module, args, kwargs)
    return partition(joint, partitioner=partitioner).bind(module)


def assert_same_training(
    module: nn.Module,
    inputs: Callable[[int], tuple[torch.Tensor, ...]],
    *,
    partitioner: str,
    num_steps: int = 3,
    num_passes: int = 1,
) -> None:
    """Train with the module and with the graphs, side by side, and compare every bit."""
    eager = copy.deepcopy(module)
    bound = bind(module, *inputs(0), partitioner=partitioner)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, eager)]
    for step in range(num_steps):
        for number in range(num_passes):
            x = inputs(10 * step + number)
            losses = []
            for call in (bound, eager):
                torch.manual_seed(step)
                loss = call(*x).float().sin().sum()
                loss.backward()
                losses.append(loss.detach())
                # Whatever the backward draws, what follows must draw the same.
                losses.append(torch.rand(1))
            assert torch.equal(losses[0], losses[2])
            assert torch.equal(losses[1], losses[3])
        for (name, mine), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad), name
        for (name, mine), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(mine, theirs), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
class TestEqualsEager:
    def test_with_tied_weights_and_a_buffer_that_counts(self, partitioner: str) -> None:
        torch.manual_seed(0)
        assert_same_training(TiedModel(), lambda seed: (batch(seed)[0],), partitioner=partitioner)

    def test_with_gradients_that_accumulate(self, partitioner: str) -> None:
        torch.manual_seed(0)
        assert_same_training(
            TiedModel(), lambda seed: (batch(seed)[0],), partitioner=partitioner, num_passes=2
        )

    def test_with_random_operators(self, partitioner: str) -> None:
        torch.manual_seed(0)
        assert_same_training(
            Dropping(), lambda seed: (torch.full((4, 8), seed / 7),), partitioner=partitioner
        )

    def test_with_sizes_that_depend_on_data(self, partitioner: str) -> None:
        torch.manual_seed(0)

        def rows(seed: int) -> tuple[torch.Tensor]:
            return (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)),)

        sizes = {int((rows(seed)[0].sum(-1) > 0).sum()) for seed in (0, 10, 20)}
        assert len(sizes) > 1
        assert_same_training(Chosen(), rows, partitioner=partitioner)


def test_outputs_come_back_as_the_tree_they_were() -> None:
    module, x = Tree(), torch.rand(2, 3)
    found, expected = bind(module, x)(x), module(x)
    assert found.keys() == expected.keys()
    assert (found["name"], found["nothing"]) == ("tree", None)
    assert torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found["more"][1], expected["more"][1])
    assert found["more"][0].requires_grad
    assert not found["more"][1].requires_grad


def test_an_output_without_a_gradient_has_no_part_in_those_of_parameters() -> None:
    module, x = Tree(), torch.rand(2, 3)
    bound = bind(module, x)
    bound(x)["more"][0].sum().backward()
    expected = torch.autograd.grad(module(x)["more"][0].sum(), list(module.a.parameters()))
    for parameter, gradient in zip(module.a.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert module.b.weight.grad is None


def test_gradients_reach_arguments() -> None:
    module, x, scale = ManyNames(), torch.rand(3, requires_grad=True), torch.rand(3)
    bound = bind(module, x, scale=scale)
    mine = torch.autograd.grad(bound(x, scale=scale).sum(), [x, module.zeta])
    theirs = torch.autograd.grad(module(x, scale=scale).sum(), [x, module.zeta])
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_parameter_without_a_part_in_the_output_has_no_gradient() -> None:
    module, x, scale = ManyNames(), torch.rand(3), torch.rand(3)
    bind(module, x, scale=scale)(x, scale=scale).sum().backward()
    assert module.unused.grad is None
    assert module.frozen.grad is None
    assert module.zeta.grad is not None


def test_without_gradients_nothing_is_kept() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    bound = bind(module, x)
    with torch.no_grad():
        assert bound(x).grad_fn is None
    assert torch.equal(bound(x), module(x))


def test_replaced_and_loaded_parameters_are_seen() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    bound = bind(module, x)
    module.linear.weight = nn.Parameter(torch.rand(3, 4))
    assert torch.equal(bound(x), module(x))
    module.load_state_dict({"linear.weight": torch.rand(3, 4)}, assign=True)
    assert torch.equal(bound(x), module(x))
    bound(x).sum().backward()
    assert module.linear.weight.grad is not None


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_a_dimension_marked_dynamic_stays_open(partitioner: str) -> None:
    torch.manual_seed(0)
    module, example = TiedModel(), batch(1)[0]
    torch._dynamo.mark_dynamic(example, 0)
    bound = bind(module, example, partitioner=partitioner)
    for rows in (2, 3, 7):
        tokens, _ = batch(rows, (rows, 4))
        mine = torch.autograd.grad(bound(tokens).sin().sum(), list(module.parameters()))
        theirs = torch.autograd.grad(module(tokens).sin().sum(), list(module.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_an_argument_that_the_module_updates_is_updated() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.weight * x

    module, x = Shifting(), torch.rand(3)
    bound, expected = bind(module, x), x + 1
    assert torch.equal(bound(x), module.weight * expected)
    assert torch.equal(x, expected)


def test_another_module_of_the_same_structure_can_be_bound() -> None:
    x = torch.rand(2, 4)
    parts = partition(export_joint_graph(Gelu(), (x,)))
    other = Gelu()
    assert torch.equal(parts.bind(other)(x), other(x))


def test_compiled_forms_run_in_place_of_the_graphs() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    parts = partition(export_joint_graph(module, (x,)))
    called: list[str] = []

    def forward(inputs: list[Any]) -> Any:
        called.append("forward")
        return parts.forward(*inputs)

    def backward(inputs: list[Any]) -> Any:
        called.append("backward")
        return parts.backward(*inputs)

    parts.bind(module, forward=forward, backward=backward)(x).sum().backward()
    assert called == ["forward", "backward"]


def test_what_was_saved_can_be_freed_while_the_backward_runs() -> None:
    module, x = TiedModel(), batch(1)[0]
    parts = partition(export_joint_graph(module, (x,)), partitioner="save_all")
    computed = [
        index
        for index, each in enumerate(parts.backward_inputs)
        if each.kind == "saved" and not each.name.startswith(("parameter", "argument"))
    ]
    freed: list[bool] = []

    def backward(inputs: list[Any]) -> Any:
        saved = [weakref.ref(inputs[index]) for index in computed]
        results = parts.backward(*inputs)
        freed.extend(tensor() is not None for tensor in saved)
        inputs.clear()
        freed.extend(tensor() is None for tensor in saved)
        return results

    parts.bind(module, backward=backward)(x).sum().backward()
    assert freed
    assert all(freed)


def test_a_gradient_laid_out_otherwise_is_laid_out_anew() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    tangent = torch.rand(3, 2).t()
    assert not tangent.is_contiguous()
    (mine,) = torch.autograd.grad(bind(module, x)(x), [module.linear.weight], tangent)
    (theirs,) = torch.autograd.grad(module(x), [module.linear.weight], tangent)
    assert torch.equal(mine, theirs)


def test_a_retained_graph_runs_again_and_another_does_not() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    out = bind(module, x)(x).sum()
    first = torch.autograd.grad(out, [module.linear.weight], retain_graph=True)
    second = torch.autograd.grad(out, [module.linear.weight])
    assert torch.equal(first[0], second[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, [module.linear.weight])


def test_gradients_of_gradients_are_refused() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    out = bind(module, x)(x).sum()
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(out, [module.linear.weight], create_graph=True)
    assert str(error.value) == (
        "the captured backward has no backward of its own: differentiate without "
        "create_graph=True, or call the module itself"
    )


def test_a_parameter_changed_before_the_backward_is_an_error_as_in_eager() -> None:
    module, x = TiedModel(), batch(1)[0]
    out = bind(module, x)(x).sum()
    with torch.no_grad():
        module.blocks[0].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_another_shape_is_an_error_naming_both() -> None:
    with pytest.raises(InputMismatchError) as error:
        bind(Gelu(), torch.rand(2, 4))(torch.rand(3, 4))
    assert str(error.value) == (
        "the inputs are not those of the captured step:\n"
        "  x: torch.float32 [3, 4], captured as torch.float32 [2, 4]"
    )


def test_a_gradient_that_was_not_captured_is_an_error() -> None:
    module, x = Gelu(), torch.rand(2, 4)
    with pytest.raises(InputMismatchError) as error:
        bind(module, x)(x.requires_grad_())
    assert str(error.value) == (
        "these require a gradient and did not when they were captured, so that none would reach "
        "them:\n  argument x"
    )
    many, x, scale = ManyNames(), torch.rand(3), torch.rand(3)
    bound = bind(many, x, scale=scale)
    many.frozen.requires_grad_()
    with pytest.raises(StateMismatchError, match="frozen requires a gradient, and did not"):
        bound(x, scale=scale)


def test_evaluation_with_what_was_captured_in_training_is_an_error() -> None:
    module, x = Dropping(), torch.rand(2, 8)
    bound = bind(module, x)
    module.eval()
    with pytest.raises(StateMismatchError) as error:
        bound(x)
    assert str(error.value) == (
        "this is not as it was when it was captured:\n"
        "  the module and all 2 in it are in evaluation mode, and were in training mode"
    )


def test_one_submodule_in_another_mode_is_an_error() -> None:
    module, x = nn.Sequential(Dropping(), nn.Linear(8, 8)), torch.rand(2, 8)
    bound = bind(module, x)
    module[1].eval()
    with pytest.raises(StateMismatchError, match="module 1 is in evaluation mode"):
        bound(x)


def test_ambient_autocast_that_was_not_captured_is_an_error() -> None:
    module, x = nn.Linear(8, 8), torch.rand(2, 8)
    bound = bind(module, x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StateMismatchError) as error:
        bound(x)
    assert str(error.value).endswith("autocast is on for cpu in torch.bfloat16, and was off")


def test_what_was_captured_under_autocast_casts_once() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.rand(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        expected.sum().backward()
        gradients = [p.grad for p in module.parameters()]
        module.zero_grad()
        result = bind(module, x)(x)
        result.sum().backward()
    assert torch.equal(result, expected)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
