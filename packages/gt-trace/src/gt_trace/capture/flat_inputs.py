"""State and arguments of a step taken apart into plain tensors, in the order of placeholders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gt_trace._torch_internals import (
    DimDynamic,
    FakeTensorMode,
    StatelessSymbolicContext,
    fake_over_meta,
    no_dispatch,
    pytree,
)
from gt_trace.capture.block_masks import register_block_masks
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.input_preparers import TraceInputs
from gt_trace.capture.module_state import StateSlot, state_names
from gt_trace.capture.stand_ins import compared_attributes, is_live, liken, reserved_attributes
from gt_trace.capture.subclass_layout import (
    TensorLayout,
    flatten_tensor,
    unflatten_tensor,
    unknown_subclass,
)
from gt_trace.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatArgument:
    """One leaf of the argument tree."""

    name: str
    leaf: Any
    layout: TensorLayout | None
    """How a tensor is made of plain ones; None for a leaf that is no tensor."""

    same_as: str | None = None
    """An input before this one that is the same tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatInputs:
    """Everything that the graph will be a function of."""

    slots: tuple[StateSlot, ...]
    state_layouts: tuple[TensorLayout, ...]
    arguments: tuple[FlatArgument, ...]
    argument_spec: pytree.TreeSpec

    @classmethod
    def of(
        cls, fn: Callable[..., Any], slots: Sequence[StateSlot], inputs: TraceInputs
    ) -> FlatInputs:
        """Take ``slots`` and ``inputs`` apart; ``fn`` gives the arguments their names.

        Raises:
            CaptureError: a leaf that can neither be an input nor a constant; all are listed.
        """
        register_block_masks()
        with_paths, spec = pytree.tree_flatten_with_path((inputs.args, dict(inputs.kwargs)))
        positional = _positional_names(fn)
        arguments: list[FlatArgument] = []
        problems: list[str] = []
        known = state_names(slots)
        for path, leaf in with_paths:
            name = _path_name(path, positional)
            same_as = None
            layout = flatten_tensor(leaf)[1] if isinstance(leaf, torch.Tensor) else None
            if layout is None and not isinstance(leaf, bool | int | float | complex | str | None):
                problems.append(
                    f"{name} is a {type(leaf).__name__}; pass tensors, numbers, strings, None or "
                    "containers of them, and let the step read other objects by closure"
                )
            if isinstance(leaf, torch.Tensor):
                if problem := _tensor_problem(leaf):
                    problems.append(f"{name} is {problem}")
                problems += _reserved_names(name, leaf)
                first = known.setdefault(id(leaf), name)
                same_as = first if first is not name else None
            arguments.append(FlatArgument(name=name, leaf=leaf, layout=layout, same_as=same_as))
        what = "arguments" if problems else "state"
        for slot in slots:
            name = f"{slot.entry.kind} {slot.entry.name}"
            if unknown_subclass(slot.tensor):
                problems.append(f"{name} is {_of_unknown_class(slot.tensor)}")
            problems += _reserved_names(name, slot.tensor)
        if problems:
            raise CaptureError(f"the step's {what} cannot be captured:\n  " + "\n  ".join(problems))
        return cls(
            slots=tuple(slots),
            state_layouts=tuple(flatten_tensor(slot.tensor)[1] for slot in slots),
            arguments=tuple(arguments),
            argument_spec=spec,
        )

    def tensors(self) -> list[tuple[torch.Tensor, TensorLayout]]:
        """State tensors, then argument tensors, whole."""
        state = [
            (slot.tensor, layout)
            for slot, layout in zip(self.slots, self.state_layouts, strict=True)
        ]
        return state + [(a.leaf, a.layout) for a in self.arguments if a.layout is not None]

    def graph_inputs(self) -> tuple[GraphInput, ...]:
        """What each placeholder stands for."""
        state = [
            GraphInput(kind=entry.kind, name=entry.name, aliases=entry.names[1:], leaf=leaf)
            for entry, layout in zip(
                (slot.entry for slot in self.slots), self.state_layouts, strict=True
            )
            for leaf in range(layout.num_leaves)
        ]
        arguments = [
            GraphInput(kind="argument", name=argument.name, leaf=leaf)
            for argument in self.arguments
            if argument.layout is not None
            for leaf in range(argument.layout.num_leaves)
        ]
        return (*state, *arguments)

    def fake(self, fake_mode: FakeTensorMode, meta_device: torch.device) -> list[torch.Tensor]:
        """A fake tensor for each placeholder; tensors on meta stand for ones on that device."""
        return [
            fake_like(leaf, fake_mode, meta_device=meta_device)
            for tensor, _ in self.tensors()
            for leaf in flatten_tensor(tensor)[0]
        ]

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of tensors that are arguments, by how a message names them."""
        given = [each for each in self.arguments if each.layout is not None]
        return {f"argument {a.name}": a.leaf.__dict__ for a in given if is_live(a.leaf)}

    def rebuild(self, plain: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], TraceInputs]:
        """The state tensors and the arguments over other plain tensors, one per placeholder."""
        start = 0
        whole: list[torch.Tensor] = []
        made: dict[int, torch.Tensor] = {}
        for original, layout in self.tensors():
            if id(original) not in made:
                tensor = unflatten_tensor(plain[start : start + layout.num_leaves], layout)
                tensor.requires_grad_(original.requires_grad)
                made[id(original)] = liken(tensor, original)
            whole.append(made[id(original)])
            start += layout.num_leaves
        state = whole[: len(self.slots)]
        tensors = iter(whole[len(self.slots) :])
        leaves = [a.leaf if a.layout is None else next(tensors) for a in self.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self.argument_spec)
        return state, TraceInputs(args=args, kwargs=kwargs)

    def signatures(self, fakes: Sequence[torch.Tensor]) -> tuple[ArgumentSignature, ...]:
        """What a later call must pass, after the trace has settled the sizes of ``fakes``.

        Raises:
            CaptureError: the step needed the concrete value of a dimension marked dynamic.
        """
        start = sum(layout.num_leaves for layout in self.state_layouts)
        signatures: list[ArgumentSignature] = []
        problems: list[str] = []
        for argument in self.arguments:
            if argument.layout is None:
                signatures.append(
                    ArgumentSignature(name=argument.name, is_tensor=False, constant=argument.leaf)
                )
                continue
            sizes = tuple(argument.leaf.shape)
            if argument.layout.subclass is None:
                sizes = tuple(fakes[start].shape)
                problems.extend(_specialized(argument, sizes))
            start += argument.layout.num_leaves
            signatures.append(
                ArgumentSignature(
                    name=argument.name,
                    is_tensor=True,
                    shape=tuple(size if isinstance(size, int) else None for size in sizes),
                    dtype=argument.leaf.dtype,
                    layout=argument.layout,
                    requires_grad=argument.leaf.requires_grad,
                    same_as=argument.same_as,
                    attributes=tuple(compared_attributes(argument.leaf).items()),
                )
            )
        if problems:
            raise CaptureError(
                "dimensions marked dynamic were fixed by the step:\n  " + "\n  ".join(problems)
            )
        return tuple(signatures)


def fake_like(
    tensor: torch.Tensor, fake_mode: FakeTensorMode, *, meta_device: torch.device
) -> torch.Tensor:
    """A fake of a plain tensor: sizes are static, except in dimensions marked dynamic."""
    if tensor.is_meta and meta_device.type != "meta":
        with no_dispatch():
            element = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        return fake_over_meta(element, fake_mode, meta_device, dispatch_keys=None)
    backed, unbacked = _marked(tensor)
    plain = tensor.detach()
    if not backed and not unbacked:
        return fake_mode.from_tensor(plain, static_shapes=True)
    sizes = [
        DimDynamic.UNBACKED
        if dim in unbacked
        else DimDynamic.DYNAMIC
        if dim in backed
        else DimDynamic.STATIC
        for dim in range(tensor.dim())
    ]
    return fake_mode.from_tensor(
        plain, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
    )


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    """Return what a graph of plain tensors would lose of an argument."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        return f"{kind}; pass its dense parts, and put them together inside the step"
    if tensor.is_quantized:
        return "a quantized tensor; pass .int_repr(), and quantize inside the step"
    return _of_unknown_class(tensor) if unknown_subclass(tensor) else None


def _of_unknown_class(tensor: torch.Tensor) -> str:
    return (
        f"a {type(tensor).__name__}, whose own behavior the graph would lose; pass "
        ".as_subclass(torch.Tensor)"
    )


def _reserved_names(name: str, tensor: torch.Tensor) -> list[str]:
    return [
        f"{name} has an attribute {key!r}, a name that the tensors of a trace use; set another"
        for key in reserved_attributes(tensor)
    ]


def _marked(tensor: torch.Tensor) -> tuple[set[int], set[int]]:
    """Dimensions that ``torch._dynamo.mark_dynamic`` and ``mark_unbacked`` marked."""
    backed: set[int] = getattr(tensor, "_dynamo_dynamic_indices", set())
    unbacked: set[int] = getattr(tensor, "_dynamo_unbacked_indices", set())
    return backed, unbacked


def _specialized(argument: FlatArgument, sizes: Sequence[int | torch.SymInt]) -> list[str]:
    backed, unbacked = _marked(argument.leaf)
    problems: list[str] = []
    for dim in sorted(backed | unbacked):
        size = sizes[dim]
        expression: Any = size.node.expr if isinstance(size, torch.SymInt) else size
        if isinstance(size, int) or expression.is_number:
            problems.append(f"{argument.name} dim {dim}: needed to be {expression}")
    return problems


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters of ``fn``, as far as it shows them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _path_name(path: tuple[Any, ...], positional: Sequence[str]) -> str:
    """``(0, 2, 'positions')`` becomes ``extra_kwargs['positions']``."""
    is_keyword = pytree.keystr(path[:1]) == "[1]"
    first = getattr(path[1], "key" if is_keyword else "idx")
    if is_keyword:
        head = str(first)
    else:
        head = positional[first] if first < len(positional) else f"args[{first}]"
    return head + str(pytree.keystr(path[2:]))
