"""The forward of a placed model: the planned graph on this rank's tensors, differentiable.

One autograd function runs the forward instructions, and its backward the backward instructions, so
that eager execution and a trace run the very same operators. The model's own modules are not
called; they hold the parameters and buffers, which are read by name at every call.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import module_hooks
from gt_autoparallel.apply.local_program import LocalProgram, Values
from gt_autoparallel.apply.placed_inputs import InputReader
from gt_autoparallel.errors import PlacementError
from gt_autoparallel.graph.layouts import short_text
from gt_autoparallel.graph.placement_graph import ModelInterface
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_trace import calls_of_one_place


class PlacedForward:
    """Called in place of the forward of ``model``, which holds the placed parameters.

    ``called_modules`` names the modules inside that are called, with all that they hold: only these
    may have hooks. None: any may, and those of others do not run.
    """

    makes_traced_calls = True
    """Its instructions can be copied in a capture: see ``gt_trace.stamping``."""

    def __init__(
        self,
        model: nn.Module,
        program: LocalProgram,
        *,
        interface: ModelInterface,
        inputs: InputReader,
        mesh: DeviceMesh,
        expert_meshes: Mapping[tuple[str, ...], DeviceMesh],
        called_modules: frozenset[str] | None = frozenset(),
    ) -> None:
        self._model = model
        self._program = program
        self._interface = interface
        self._inputs = inputs
        self.mesh = mesh
        """With the planned axes."""

        self.expert_meshes = expert_meshes
        """Over which experts exchange tokens, by the names of the axes in each."""

        self._called_modules = called_modules
        self.may_evaluate = False
        """Whether evaluation computes what the planned forward does; see ``allow_evaluation``."""

        self._training = {name: module.training for name, module in model.named_modules()}
        self._planned = {name: _state(p) for name, p in model.named_parameters()}
        self._parameters = _places(model, program.parameters, "_parameters")
        self._buffers = _places(model, program.buffers, "_buffers")

    @property
    def plan(self) -> PlacementPlan:
        """The plan that the forward runs."""
        return self._inputs.plan

    @property
    def interface(self) -> ModelInterface:
        """How the model is called, and what it returns."""
        return self._interface

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
            PlacementError: the model is in another mode (training or evaluation) than planned, its
                parameters have other dtypes or sizes, one that was frozen shall be trained,
                autocast is on, or modules inside have hooks.
        """
        self._check_mode()
        self._check_parameters()
        self._check_hooks()
        _check_autocast()
        inputs = self._inputs.local_tensors(args, kwargs)
        slots = [*self._program.parameters.values(), *self._program.buffers.values(), *inputs]
        tensors = [
            *(_local(module._parameters[key]) for module, key in self._parameters),
            *(_local(module._buffers[key]) for module, key in self._buffers),
            *inputs.values(),
        ]
        results = _Placed.apply(self._program, slots, self._output_order(), *tensors)
        return self._rebuilt(dict(zip(self._output_order(), results, strict=True)))

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedForward:
        """The forward of the model's copy: the same program, on the copy's tensors.

        Raises:
            PlacementError: the model has expert blocks, which are called, and not copied.
        """
        if self._program.has_experts:
            raise PlacementError(
                "a placed model with expert blocks cannot be copied: the copy would route tokens "
                "through the first one's blocks; place a second model by the plan"
            )
        copied = object.__new__(PlacedForward)
        vars(copied).update(vars(self))
        copied._model = copy.deepcopy(self._model, memo)
        copied._parameters, copied._buffers = (
            [(copy.deepcopy(module, memo), key) for module, key in places]
            for places in (self._parameters, self._buffers)
        )
        return copied

    def __reduce__(self) -> str:
        raise PlacementError(
            "a placed model cannot be pickled, since it holds process groups: save its "
            "state_dict(), and after loading apply the plan again"
        )

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
        evaluates = self.may_evaluate and not any(m.training for m in self._model.modules())
        if changed and not evaluates:
            planned = "training" if self._training[changed[0]] else "evaluation"
            raise PlacementError(
                f"{changed[0] or 'the model'} is not in {planned} mode, in which it was planned: a "
                f"placed model runs the graph of that mode only; call "
                + (
                    "train(), or allow_evaluation(), which sees whether eval() changes nothing"
                    if planned == "training"
                    else "eval(), or plan training"
                )
            )

    def _check_hooks(self) -> None:
        if self._called_modules is None:
            return
        lost = [*hooks_of_inner_modules(self._model, called=self._called_modules)]
        if lost:
            raise PlacementError(
                "modules inside the placed model are not called, so that these hooks would not "
                "run; remove them, and hook the model itself or its parameters:\n  "
                + "\n  ".join(lost)
            )

    def _check_parameters(self) -> None:
        problems = []
        for name, parameter in self._model.named_parameters():
            planned, found = self._planned.get(name), _state(parameter)
            if planned is None or planned == found:
                continue
            if found[:2] != planned[:2]:
                problems.append(
                    f"{name} is {found[0]} placed as {found[1]}, and was planned as {planned[0]} "
                    f"placed as {planned[1]}"
                )
            elif found[2]:
                problems.append(
                    f"{name} was frozen when the model was planned, and would get no gradient; "
                    "freeze it, or plan again"
                )
        if problems:
            raise PlacementError("parameters of the placed model:\n  " + "\n  ".join(problems))


def _check_autocast() -> None:
    for device_type in ("cpu", torch.accelerator.current_accelerator(check_available=True)):
        if device_type is not None and torch.is_autocast_enabled(str(device_type)):
            raise PlacementError(
                f"autocast is on for {device_type}, and a placed model computes in the dtypes of "
                "its plan: leave autocast out, and plan with compute_dtype="
            )


def _places(model: nn.Module, slots: Mapping[str, int], holder: str) -> list[tuple[nn.Module, str]]:
    """The module and the key that hold each named tensor, in order."""
    places = []
    for name in slots:
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        assert key in getattr(module, holder)
        places.append((module, key))
    return places


def _state(parameter: torch.Tensor) -> tuple[torch.dtype, str, bool]:
    """What a plan takes for granted: dtype, layout in words, and whether it is trained."""
    layout = short_text(parameter.placements) if isinstance(parameter, DTensor) else "one tensor"
    return parameter.dtype, f"{layout} of {tuple(parameter.shape)}", parameter.requires_grad


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
        with calls_of_one_place():
            for instruction in program.forward:
                instruction.execute(values, state)
        ctx.program, ctx.slots, ctx.outputs, ctx.state = program, slots, outputs, state
        ctx.save_for_backward(*(values[slot] for slot in program.saved))
        # A function must not return its input, nor one tensor twice; views of them are enough.
        tensors = tuple(values[program.outputs[node]] for node in outputs)
        results = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise PlacementError(
                "gradients of a placed model cannot be differentiated once more: only forward and "
                "backward were planned; leave create_graph out"
            )
        program: LocalProgram = ctx.program
        values: Values = dict(zip(program.saved, ctx.saved_tensors, strict=True))
        tangent_of = ctx.program.tangent_of_output
        for node, gradient in zip(ctx.outputs, gradients, strict=True):
            if node in tangent_of:
                values[program.tangents[tangent_of[node]]] = gradient
        with calls_of_one_place():
            for instruction in program.backward:
                instruction.execute(values, ctx.state)
        slot_of_gradient = {
            **{program.parameters[name]: slot for name, slot in program.gradients.items()},
            **{program.inputs[node]: slot for node, slot in program.input_gradients.items()},
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


def hooks_of_inner_modules(model: nn.Module, *, called: Collection[str]) -> Iterator[str]:
    """A line for each module inside ``model`` with hooks that the placed model does not run.

    It runs those of ``called`` modules, with all that they hold: the routed experts.
    """
    for name, module in model.named_modules():
        if name and not any(name == each or name.startswith(f"{each}.") for each in called):
            registered = module_hooks(module)
            if registered:
                yield f"{name} has hooks ({', '.join(registered)})"


def hooks_of_model(model: nn.Module) -> Iterator[str]:
    """A line if ``model`` itself has hooks: they run around the plan, which has them already."""
    registered = module_hooks(model)
    if registered:
        yield (
            f"the model itself has hooks ({', '.join(registered)}), which ran while it was planned "
            "and would run once more around the plan; register them after it is placed"
        )
