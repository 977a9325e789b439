"""A forward and a backward graph in place of a module: called like it, differentiable like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from gt_trace._torch_internals import pytree
from gt_trace._torch_joint_internals import AsyncCollectiveTensor
from gt_trace.boxed_code import BoxedFunction, boxed
from gt_trace.capture.autocast_cache import RECAST
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.capture.captured_mode import ModeGuard, as_captured
from gt_trace.capture.graph_inputs import GraphInput, InputKind
from gt_trace.capture.subclass_layout import PLAIN, unflatten_tensor
from gt_trace.errors import InputMismatchError, StateMismatchError
from gt_trace.joint.backward_variants import for_any_layout, without_tangents
from gt_trace.joint.joint_graph import GraphResult, JointGraph, OutputSignature


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """A forward and a backward graph, both functions of plain tensors with fake values.

    Passes edit them in place, each by itself, and keep their inputs and results.
    """

    joint: JointGraph
    """The joint graph that was cut, as it was."""

    forward: GraphModule
    forward_inputs: tuple[GraphInput, ...]
    """What each placeholder of the forward stands for: parameters, buffers, arguments."""

    forward_results: tuple[GraphResult, ...]
    """What the forward returns: mutations and outputs, then what is saved for the backward."""

    backward: GraphModule
    backward_inputs: tuple[GraphInput, ...]
    """What each placeholder of the backward stands for: tangents, and what was saved, named as in
    ``forward_results``."""

    backward_results: tuple[GraphResult, ...]
    """What the backward returns: gradients."""

    backward_as_cut: GraphModule | None = None
    """The backward before passes, from which the graph for undefined gradients is made. None if
    only one gradient arrives, and for a backward that was stored."""

    @property
    def static_input_names(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that the leading inputs of the forward hold."""
        static = [each for each in self.forward_inputs if each.kind in ("parameter", "buffer")]
        return tuple(each.name for each in static)

    def bind(
        self,
        module: nn.Module,
        *,
        forward: BoxedFunction | None = None,
        backward: BoxedFunction | None = None,
    ) -> BoundJoint:
        """A callable in place of ``module``, differentiable by autograd.

        Args:
            module: the captured module, or one of the same structure and layouts.
            forward: runs instead of the forward graph, as a compiled form of it. Takes the plain
                tensors in a list, which it may empty, and returns the plain results.
            backward: likewise.

        Raises:
            StateMismatchError: names, shapes, dtypes or placements differ from the captured ones.
        """
        return BoundJoint(self, module, forward=forward, backward=backward)


class BoundJoint:
    """Two graphs bound to the live state of a module; call it with the module's arguments.

    Outputs carry the autograd history that the module's would: gradients reach parameters and
    arguments when somebody differentiates. Buffers are updated in place. The state is sampled once,
    and again only when an object of it was replaced.
    """

    def __init__(
        self,
        parts: ForwardBackward,
        module: nn.Module,
        *,
        forward: BoxedFunction | None = None,
        backward: BoxedFunction | None = None,
    ) -> None:
        self.parts = parts
        self._module = module
        self._forward = forward or boxed(parts.forward)
        self._backward = backward or boxed(parts.backward)
        self._may_take_any_layout = backward is None
        self._variants: dict[frozenset[int], BoxedFunction | None] = {}
        """Backwards for gradients that arrive otherwise than traced, by the outputs without one.
        None if such gradients are copied to the traced layout."""

        self._inputs = BoundInputs(parts.joint, module)
        # Gradients leave through autograd, so hooks of parameters run.
        self._guard = ModeGuard(parts.joint.mode, module, lost_hooks=())
        self._plan = _Plan(parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward graph.

        Raises:
            InputMismatchError: the arguments differ from the captured ones in structure, shape,
                dtype, layout, constant value, or in whether they require a gradient.
            StateMismatchError: the state was replaced by one that does not fit, or modes, hooks or
                autocast are not those of the capture.
        """
        joint = self.parts.joint
        plain = self._inputs.plain_tensors(args, kwargs)
        self._guard.check(self._inputs.version)
        wholes = self._wholes(args, kwargs)
        differentiable = [wholes[key] for key in self._plan.gradients]
        results: tuple[Any, ...] = _Graphs.apply(self, plain, *differentiable)
        remaining = iter(results)
        leaves = [next(remaining) if o.is_tensor else o.constant for o in joint.outputs]
        for position, first in self._plan.repeated:
            leaves[position] = leaves[first]
        return pytree.tree_unflatten(leaves, joint.output_spec)

    def _wholes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[tuple[InputKind, str], torch.Tensor]:
        """State and arguments as the caller holds them, by kind and name.

        Raises:
            InputMismatchError, StateMismatchError: one requires a gradient, and did not when it was
                captured.
        """
        joint = self.parts.joint
        wholes: dict[tuple[InputKind, str], torch.Tensor] = {
            (entry.kind, entry.name): tensor
            for entry, tensor in zip(joint.state, self._inputs.state, strict=True)
        }
        leaves = pytree.tree_leaves((args, kwargs))
        for signature, leaf in zip(joint.arguments, leaves, strict=True):
            if signature.is_tensor:
                wholes["argument", signature.name] = leaf
        if torch.is_grad_enabled():
            recast = [
                name
                for name in joint.recast
                if wholes["argument", name].requires_grad and wholes["argument", name].is_leaf
            ]
            if recast:
                raise InputMismatchError(
                    f"{RECAST}, or pass what is no leaf of autograd:\n  "
                    + "\n  ".join(sorted(recast))
                )
            late = [
                (kind, name)
                for (kind, name), tensor in wholes.items()
                if tensor.requires_grad and (kind, name) not in joint.differentiable
            ]
            if late:
                lines = "\n  ".join(f"{kind} {name}" for kind, name in late)
                error = InputMismatchError if late[0][0] == "argument" else StateMismatchError
                raise error(
                    "these require a gradient and did not when they were captured, so that none "
                    f"would reach them:\n  {lines}"
                )
        return wholes

    def run_forward(self, plain: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
        """Outputs put together, and what is saved; mutated inputs are updated."""
        plan = self._plan
        with as_captured():
            results = self._forward([plain[index] for index in plan.forward_inputs])
        for position, target in plan.mutations:
            plain[target].copy_(results[position])
        outputs = [
            _assemble([results[position] for position in positions], signature)
            for signature, positions in plan.outputs
        ]
        return outputs, [results[position] for position in plan.saved]

    def run_backward(
        self,
        saved: list[Any],
        tangents: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Return gradients in the order of the inputs that they belong to; empty ``saved``.

        A tangent is None where none arrives. A gradient is None if autograd would give none.

        Raises:
            InputMismatchError: what autograd computes for these tangents is unknown.
        """
        plan = self._plan
        arrived = [plan.tangent(*each) for each in enumerate(tangents)]
        missing = frozenset(each for each in plan.examples if arrived[each] is None)
        backward = self._backward
        if missing or not plan.have_traced_layout(arrived):
            if missing not in self._variants:
                self._variants[missing] = self._variant(missing)
            variant = self._variants[missing]
            if variant is None:
                arrived = plan.in_traced_layout(arrived)
            else:
                backward = variant
        inputs = [
            saved[index] if kind == "saved" else arrived[index]
            for kind, index in plan.backward_inputs
        ]
        saved.clear()
        taken = {_storage(tangent) for tangent in arrived if tangent is not None}
        with as_captured():
            results = backward(inputs)
        gradients: list[torch.Tensor | None] = []
        for key, positions in plan.gradients.items():
            layout = self.parts.joint.gradient_layouts[key]
            leaves = [results[position] for position in positions]
            if any(leaf is None for leaf in leaves):
                gradients.append(None)
                continue
            if layout.subclass is not None:
                # Autograd sees that a plain gradient has a second owner, and not that the inside of
                # a subclass has: it would let both be scaled in place.
                leaves = [_own(leaf, taken) for leaf in leaves]
            gradients.append(unflatten_tensor(leaves, layout))
        return gradients

    def _variant(self, missing: frozenset[int]) -> BoxedFunction | None:
        """Return the backward for gradients in any layout, without those that are missing."""
        parts, outputs = self.parts, self._plan.outputs
        names = [outputs[position][0].name for position in sorted(missing)]
        graph_module = parts.backward
        if missing:
            if parts.backward_as_cut is None:
                raise InputMismatchError(
                    f"no gradient arrives for {', '.join(names)}, and a backward that was stored "
                    "has no variant for that: use all outputs in the loss, or capture anew"
                )
            graph_module = parts.backward_as_cut
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        tangents = {
            each.name: node
            for node, each in zip(placeholders, parts.backward_inputs, strict=True)
            if each.kind == "tangent"
        }
        if missing:
            gone = [tangents[name] for name in names]
            graph_module = without_tangents(graph_module, gone, tangents.values())
            kept = {node.name for node in set(tangents.values()).difference(gone)}
            arriving = [n for n in graph_module.graph.nodes if n.name in kept]
        else:
            arriving = list(tangents.values())
        if not (missing or self._may_take_any_layout):
            return None
        any_layout = for_any_layout(graph_module, arriving)
        return None if any_layout is None else boxed(any_layout)


class _Plan:
    """Which value goes where, worked out once."""

    def __init__(self, parts: ForwardBackward) -> None:
        joint = parts.joint
        places = _places_of_inputs(parts)
        self.forward_inputs = [
            places[each.kind, each.name] + each.leaf for each in parts.forward_inputs
        ]
        self.mutations: list[tuple[int, int]] = []
        """For each input that the module updates: the position of its new content among the
        results, and its own among the plain tensors."""

        of_output: dict[str, list[int]] = {}
        self.saved: list[int] = []
        saved_at: dict[str, int] = {}
        for position, result in enumerate(parts.forward_results):
            if result.kind == "mutation":
                assert result.of is not None
                self.mutations.append((position, places[result.of, result.name] + result.leaf))
            elif result.kind == "output":
                of_output.setdefault(result.name, []).append(position)
            else:
                saved_at[result.name] = len(self.saved)
                self.saved.append(position)
        tensors = [output for output in joint.outputs if output.is_tensor]
        self.outputs: list[tuple[OutputSignature, list[int]]] = [
            (output, of_output[output.name]) for output in tensors
        ]
        position_of = {output.name: position for position, output in enumerate(joint.outputs)}
        self.repeated = [
            (position, position_of[output.repeats])
            for position, output in enumerate(joint.outputs)
            if output.repeats is not None
        ]
        """Positions of outputs that are the same tensor as an earlier one, and of that one."""

        output_at = {output.name: position for position, output in enumerate(tensors)}
        self.backward_inputs: list[tuple[str, int]] = []
        """For each placeholder of the backward: whether it was saved or is a tangent, and its
        position among those."""

        self.examples: dict[int, torch.Tensor] = {}
        """The traced gradient of each output whose gradient the backward reads."""

        placeholders = parts.backward.graph.find_nodes(op="placeholder")
        for node, each in zip(placeholders, parts.backward_inputs, strict=True):
            if each.kind == "saved":
                self.backward_inputs.append(("saved", saved_at[each.name]))
            else:
                self.backward_inputs.append(("tangent", output_at[each.name]))
                self.examples[output_at[each.name]] = node.meta["val"]
        self.gradients: dict[tuple[InputKind, str], list[int]] = {}
        """For each input that gets a gradient: positions of the gradient's plain parts among the
        results of the backward."""

        for position, result in enumerate(parts.backward_results):
            assert result.of is not None
            self.gradients.setdefault((result.of, result.name), []).append(position)

    def tangent(self, position: int, arrived: torch.Tensor | None) -> torch.Tensor | None:
        """Return the plain tensor of a gradient; None if none arrives or the graph reads none."""
        if arrived is None or position not in self.examples:
            return None
        return _placed(arrived, self.outputs[position][0])

    def have_traced_layout(self, arrived: Sequence[torch.Tensor | None]) -> bool:
        """Check that all gradients have the strides for which the backward was traced."""
        return all(
            _has_layout(plain, self.examples[position])
            for position, plain in enumerate(arrived)
            if plain is not None
        )

    def in_traced_layout(self, arrived: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients, copied where their strides are others than the traced ones."""
        return [
            plain
            if plain is None or _has_layout(plain, self.examples[position])
            else _laid_out(plain, self.examples[position])
            for position, plain in enumerate(arrived)
        ]


class _Graphs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bound: BoundJoint, plain: list[torch.Tensor], *differentiable: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, saved = bound.run_forward(plain)
        ctx.bound = bound
        ctx.set_materialize_grads(False)
        is_tensor = [isinstance(value, torch.Tensor) for value in saved]
        ctx.save_for_backward(*(v for v, t in zip(saved, is_tensor, strict=True) if t))
        ctx.saved_values = [None if t else v for v, t in zip(saved, is_tensor, strict=True)]
        ctx.is_tensor = is_tensor
        signatures = [o for o in bound.parts.joint.outputs if o.is_tensor]
        ctx.mark_non_differentiable(
            *(o for o, s in zip(outputs, signatures, strict=True) if not s.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the captured backward has no backward of its own: differentiate without "
                "create_graph=True, or call the module itself"
            )
        tensors = iter(ctx.saved_tensors)
        saved = [
            next(tensors) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.saved_values, strict=True)
        ]
        del tensors
        # Each can then be freed as soon as the graph has read it, unless the caller retains them.
        ctx.maybe_clear_saved_tensors()
        bound: BoundJoint = ctx.bound
        return (None, None, *bound.run_backward(saved, tangents))


def _places_of_inputs(parts: ForwardBackward) -> dict[tuple[InputKind, str], int]:
    """Where each input's first plain tensor stands among those of state and arguments."""
    joint = parts.joint
    places: dict[tuple[InputKind, str], int] = {}
    position = 0
    for entry, layout in zip(joint.state, joint.state_layouts, strict=True):
        places[entry.kind, entry.name] = position
        position += layout.num_leaves
    for argument in joint.arguments:
        if argument.layout is not None:
            places["argument", argument.name] = position
            position += argument.layout.num_leaves
    return places


def _assemble(leaves: list[torch.Tensor], signature: OutputSignature) -> torch.Tensor:
    return unflatten_tensor(leaves, signature.layout or PLAIN)


def _placed(tangent: torch.Tensor, signature: OutputSignature) -> torch.Tensor:
    """This rank's part of a gradient, placed as the backward graph expects it."""
    placements = signature.gradient_placements
    if isinstance(tangent, DTensor) != (placements is not None):
        wanted = "a plain tensor" if placements is None else f"a DTensor placed as {placements}"
        raise InputMismatchError(
            f"the gradient of {signature.name} is a {type(tangent).__name__}, and the output is "
            f"{wanted}"
        )
    if not isinstance(tangent, DTensor):
        return tangent
    if tangent.placements != placements:
        tangent = tangent.redistribute(placements=placements)
    local = tangent.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _has_layout(plain: torch.Tensor, example: torch.Tensor) -> bool:
    stride = example.stride()
    if all(isinstance(step, int) for step in stride):
        return plain.stride() == stride
    return plain.is_contiguous()  # extents that depend on data


def _laid_out(plain: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    stride = example.stride()
    if not all(isinstance(step, int) for step in stride):
        return plain.contiguous()
    laid_out = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device)
    return laid_out.copy_(plain)


def _own(leaf: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor, or a copy of it if its memory belongs to another."""
    if _storage(leaf) in taken:
        leaf = leaf.clone(memory_format=torch.contiguous_format)
    taken.add(_storage(leaf))
    return leaf


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
