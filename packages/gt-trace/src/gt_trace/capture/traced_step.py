"""The result of a capture: a graph of plain tensors, and how to call it with the live objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_trace._torch_internals import compiled_forward, pytree
from gt_trace.boxed_code import boxed
from gt_trace.capture.bound_inputs import BoundInputs, CapturedInputs
from gt_trace.capture.captured_mode import ModeGuard, as_captured
from gt_trace.capture.subclass_layout import TensorLayout, unflatten_tensor
from gt_trace.errors import StateMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep(CapturedInputs):
    """One captured training step.

    ``graph_module`` is a function of plain tensors: static inputs first (parameters, buffers,
    optimizer state), then arguments. Passes edit it in place. In-place updates of state (buffers,
    or parameters when the optimizer was captured) are operators of the graph.
    """

    graph_module: GraphModule
    output_spec: pytree.TreeSpec
    output_layouts: tuple[TensorLayout | None, ...]
    """How each leaf of the output tree is made of plain tensors; None for a leaf that is no
    tensor."""

    written_gradients: tuple[str, ...] = ()
    """Names of the optimizer's parameters, except those whose gradients the step leaves untouched.
    They have no gradient after a call, since a graph keeps none longer than it needs it."""

    absent_gradients: tuple[str, ...] = ()
    """Names of the optimizer's parameters to whose gradients the step would add, if they had any
    when it begins; a graph begins without."""

    @property
    def training(self) -> Mapping[str, bool]:
        """Whether each part of the module was in training mode; the module itself is ""."""
        return self.mode.training

    @property
    def num_static_inputs(self) -> int:
        """Leading placeholders whose tensors keep their addresses from step to step."""
        return sum(layout.num_leaves for layout in self.state_layouts)

    def bind(
        self,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        executable: Callable[..., Sequence[Any]] | None = None,
    ) -> BoundStep:
        """A callable that runs the step on the state of ``module``.

        Args:
            module: the captured module, or one of the same structure and layouts.
            optimizer: given if one was captured.
            executable: runs instead of ``graph_module``, as a compiled form of it. Takes the
                plain tensors of the placeholders, returns the plain outputs.

        Raises:
            StateMismatchError: names, shapes, dtypes, placements, modes (training or evaluation),
                hooks, or which parameters require a gradient, differ from the captured ones.
        """
        return BoundStep(self, module, optimizer, executable or _current_code(self.graph_module))


class BoundStep:
    """A captured step bound to live state: call it with the step's arguments.

    The state is sampled once, and again only when an object of it was replaced (a parameter
    re-registered, a checkpoint loaded by assignment), which every call checks by identity.
    """

    def __init__(
        self,
        step: TracedStep,
        module: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        executable: Callable[..., Sequence[Any]],
    ) -> None:
        self.step = step
        self._executable = executable
        self._inputs = BoundInputs(step, module, optimizer)
        self._guard = ModeGuard(step.mode, module, optimizer=optimizer)
        self._without_gradient = self._places(step.written_gradients)
        self._must_have_none = self._places(step.absent_gradients)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
            InputMismatchError: the arguments differ from the captured ones in structure, shape,
                dtype, layout or constant value.
            StateMismatchError: the state was replaced by one that does not fit, or a mode (training
                or evaluation, autocast) or hooks are others than when the step was captured.
        """
        inputs = self._inputs.plain_tensors(args, kwargs)
        self._guard.check(self._inputs.version)
        self._refuse_gradients()
        with as_captured():
            outputs = self._executable(*inputs)
        if self._without_gradient:
            state = self._inputs.state
            for index in self._without_gradient:
                state[index].grad = None
        leaves = wrapped_leaves(outputs, self.step.output_layouts)
        return pytree.tree_unflatten(leaves, self.step.output_spec)

    def _places(self, names: Collection[str]) -> list[int]:
        return [index for index, entry in enumerate(self.step.state) if entry.name in names]

    def _refuse_gradients(self) -> None:
        if not self._must_have_none:
            return
        state = self._inputs.state
        found = [each for each in self._must_have_none if state[each].grad is not None]
        if found:
            names = ", ".join(self.step.state[index].name for index in found)
            raise StateMismatchError(
                f"parameters have gradients from outside of the step, which had none when it was "
                f"captured, and the step may add to them: {names}. Set .grad to None before the "
                "call, or compute all gradients inside the step"
            )


def _current_code(graph_module: GraphModule) -> Callable[..., Sequence[Any]]:
    """Return a function that runs the graph as of its last ``recompile()``."""
    compiled = compiled_forward(graph_module)
    run = boxed(graph_module)

    def call(*plain: torch.Tensor) -> Sequence[Any]:
        nonlocal run, compiled
        held = graph_module.__dict__
        if held["_forward_hooks"] or held["_forward_pre_hooks"] or "forward" in held:
            called: Sequence[Any] = graph_module(*plain)  # with the user's hooks or forward
            return called
        if type(graph_module).forward is not compiled:  # each recompile() makes another
            compiled = compiled_forward(graph_module)
            run = boxed(graph_module)
        return run([*plain])

    return call


def wrapped_leaves(outputs: Sequence[Any], layouts: Sequence[TensorLayout | None]) -> list[Any]:
    """Leaves of an output tree, made of a graph's plain outputs.

    Args:
        outputs: plain tensors, and what is no tensor.
        layouts: how each leaf is made of them; None for a leaf that is no tensor.
    """
    leaves: list[Any] = []
    start = 0
    for layout in layouts:
        if layout is None or layout.subclass is None:
            leaves.append(outputs[start])
            start += 1
            continue
        leaves.append(unflatten_tensor(outputs[start : start + layout.num_leaves], layout))
        start += layout.num_leaves
    return leaves
