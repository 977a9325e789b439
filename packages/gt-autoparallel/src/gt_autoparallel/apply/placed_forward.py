"""The forward of a placed model: the planned graph on this rank's tensors, differentiable.

One autograd function runs the forward instructions, and its backward the backward instructions, so
that eager execution and a trace run the very same operators. The model's own modules are not
called; they hold the parameters and buffers, which are read by name at every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gt_autoparallel.apply.local_program import LocalProgram, Values
from gt_autoparallel.apply.placed_inputs import InputReader
from gt_autoparallel.errors import PlacementError
from gt_autoparallel.placement_graph import ModelInterface

__all__ = ["PlacedForward"]


class PlacedForward:
    """Called in place of the forward of ``model``.

    Args:
        model: holds the placed parameters.
        program: the plan on this rank.
        interface: how the model is called, and what it returns.
        inputs: turns arguments into this rank's tensors.
        training: whether each module was in training mode when its forward was planned, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        program: LocalProgram,
        *,
        interface: ModelInterface,
        inputs: InputReader,
    ) -> None:
        self._model = model
        self._program = program
        self._interface = interface
        self._inputs = inputs
        self._training = {name: module.training for name, module in model.named_modules()}
        self._parameters = _places(model, program.parameters, "_parameters")
        self._buffers = _places(model, program.buffers, "_buffers")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned forward.

        Args:
            args: as the model's own forward takes them; each tensor is this rank's shard in the
                planned layout of that input, or a ``DTensor`` that is placed so.
            kwargs: likewise.

        Returns:
            What the model's own forward returns, each tensor being this rank's shard in the planned
            layout of that output.

        Raises:
            PlacementInputError: arguments that are not the planned ones; all are named.
            PlacementError: the model is in another mode (training or evaluation) than planned.
        """
        self._check_mode()
        inputs = self._inputs.local_tensors(args, kwargs)
        slots = [*self._program.parameters.values(), *self._program.buffers.values(), *inputs]
        tensors = [
            *(_local(module._parameters[key]) for module, key in self._parameters),
            *(_local(module._buffers[key]) for module, key in self._buffers),
            *inputs.values(),
        ]
        results = _Placed.apply(self._program, slots, self._output_order(), *tensors)
        return self._rebuilt(dict(zip(self._output_order(), results, strict=True)))

    def _output_order(self) -> tuple[int, ...]:
        return tuple(self._program.outputs)

    def _rebuilt(self, results: Mapping[int, torch.Tensor]) -> Any:
        leaves = [
            leaf.constant if leaf.node is None else results[leaf.node]
            for leaf in self._interface.outputs
        ]
        return pytree.tree_unflatten(leaves, self._interface.output_spec)

    def _check_mode(self) -> None:
        changed = [
            name
            for name, module in self._model.named_modules()
            if self._training.get(name, module.training) != module.training
        ]
        if changed:
            planned = "training" if self._training[changed[0]] else "evaluation"
            raise PlacementError(
                f"{_or_model(changed[0])} is not in {planned} mode, in which it was planned: a "
                f"placed model runs the graph of that mode only; call "
                f"{'train()' if planned == 'training' else 'eval()'}, or plan the other mode too"
            )


def _or_model(name: str) -> str:
    return name or "the model"


def _places(model: nn.Module, slots: Mapping[str, int], holder: str) -> list[tuple[nn.Module, str]]:
    """The module and the key that hold each named tensor, in order."""
    places = []
    for name in slots:
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        assert key in getattr(module, holder)
        places.append((module, key))
    return places


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Placed(torch.autograd.Function):
    """(program, slots, order of outputs, tensors in those slots) -> outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        program: LocalProgram,
        slots: Sequence[int],
        outputs: Sequence[int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        values: Values = dict(zip(slots, tensors, strict=True))
        state: dict[str, Any] = {}
        for instruction in program.forward:
            instruction.execute(values, state)
        ctx.program, ctx.slots, ctx.outputs, ctx.state = program, slots, outputs, state
        ctx.save_for_backward(*(values[slot] for slot in program.saved))
        # A function must not return its input, nor one tensor twice; views of them are enough.
        results = tuple(_as_new(values[program.outputs[node]]) for node in outputs)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        program: LocalProgram = ctx.program
        values: Values = dict(zip(program.saved, ctx.saved_tensors, strict=True))
        tangent_of = ctx.program.tangent_of_output
        for node, gradient in zip(ctx.outputs, gradients, strict=True):
            if node in tangent_of:
                values[program.tangents[tangent_of[node]]] = gradient
        for instruction in program.backward:
            instruction.execute(values, ctx.state)
        slot_of_gradient = {
            program.parameters[name]: slot for name, slot in program.gradients.items()
        }
        return (
            None,
            None,
            None,
            *(
                values[slot_of_gradient[slot]] if slot in slot_of_gradient else None
                for slot in ctx.slots
            ),
        )


def _as_new(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)
