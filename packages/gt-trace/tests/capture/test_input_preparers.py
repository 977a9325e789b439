"""Dynamic dimensions, and hooks on the inputs of a trace."""

from __future__ import annotations

import pytest
import torch

from gt_trace import CaptureError, InputMismatchError, InputPreparer, TraceInputs, trace_step
from gt_trace.joint import export_joint_graph, partition


class MarkDynamic(InputPreparer):
    """Marks dimension 0 of the first argument."""

    def before_faking(self, inputs: TraceInputs) -> TraceInputs:
        torch._dynamo.mark_dynamic(inputs.args[0], 0)
        return inputs


class Double(InputPreparer):
    """Doubles the first argument, inside the trace."""

    def inside_trace(self, inputs: TraceInputs) -> TraceInputs:
        return TraceInputs(args=(inputs.args[0] * 2, *inputs.args[1:]), kwargs=inputs.kwargs)


def test_a_joint_graph_has_what_preparers_compute() -> None:
    module, x = torch.nn.Linear(3, 2), torch.rand(4, 3, requires_grad=True)
    joint = export_joint_graph(module, (x,), input_preparers=[MarkDynamic(), Double()])
    bound = partition(joint).bind(module)
    for inputs in (x, torch.rand(7, 3, requires_grad=True)):
        mine = torch.autograd.grad(bound(inputs).sin().sum(), [inputs, module.weight])
        theirs = torch.autograd.grad(module(inputs * 2).sin().sum(), [inputs, module.weight])
        assert all(map(torch.equal, mine, theirs))


def test_dimension_marked_dynamic_takes_other_sizes() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum(0)

    traced = trace_step(step, input_preparers=[MarkDynamic()])(torch.rand(4, 3))
    bound = traced.bind()
    for size in (2, 4, 9):
        x = torch.rand(size, 3)
        assert torch.equal(bound(x), step(x))
    with pytest.raises(InputMismatchError) as error:
        bound(torch.rand(4, 5))
    assert str(error.value) == (
        "the inputs are not those of the captured step:\n"
        "  x: torch.float32 [4, 5], captured as torch.float32 [any, 3]"
    )


def test_size_that_breaks_a_guard_of_the_capture_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 3 else x - 1

    bound = trace_step(step, input_preparers=[MarkDynamic()])(torch.rand(5)).bind()
    assert torch.equal(bound(torch.ones(4)), torch.full((4,), 2.0))
    with pytest.raises(
        InputMismatchError, match="x dim 0 is 2, captured for sizes from 4 on; pass"
    ):
        bound(torch.ones(2))


def test_step_that_fixes_a_dynamic_dimension_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 2)

    with pytest.raises(CaptureError) as error:
        trace_step(step, input_preparers=[MarkDynamic()])(torch.rand(4))
    assert str(error.value) == (
        "dimensions marked dynamic were fixed by the step:\n  x dim 0: needed to be 4"
    )


def test_preparer_inside_the_trace_becomes_part_of_the_graph() -> None:
    bound = trace_step(lambda x: x + 1, input_preparers=[Double(), Double()])(torch.ones(2)).bind()
    assert torch.equal(bound(torch.full((2,), 3.0)), torch.full((2,), 13.0))


def test_inputs_are_prepared_again_when_a_step_that_installs_hooks_is_captured_again() -> None:
    layer = torch.nn.Linear(3, 3)
    handles: list[object] = []
    prepared: list[torch.Tensor] = []

    class Counts(InputPreparer):
        def before_faking(self, inputs: TraceInputs) -> TraceInputs:
            prepared.append(inputs.args[0])
            return inputs

    def step(x: torch.Tensor) -> torch.Tensor:
        if not handles:
            handles.append(layer.register_forward_hook(lambda *_: None))
        return layer(x)

    x = torch.rand(2, 3)
    trace_step(step, module=layer, input_preparers=[Counts()])(x)
    assert len(prepared) == 2
    assert all(each is x for each in prepared)
