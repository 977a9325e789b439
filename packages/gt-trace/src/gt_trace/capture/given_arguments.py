"""The arguments of a call, compared with the captured ones and taken apart into plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gt_trace._torch_internals import ShapeEnv, pytree
from gt_trace.capture.argument_structure import structure_differences
from gt_trace.capture.given_layout import laid_out, reads_offset
from gt_trace.capture.graph_inputs import ArgumentSignature, same_constant
from gt_trace.capture.input_uses import InputUse
from gt_trace.capture.python_holders import short
from gt_trace.capture.python_state import is_same
from gt_trace.capture.stand_ins import compared_attributes
from gt_trace.capture.subclass_layout import (
    PLAIN_TYPES,
    TensorLayout,
    flatten_tensor,
    unknown_subclass,
)
from gt_trace.errors import InputMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """What a call must pass for one leaf of its arguments."""

    signature: ArgumentSignature
    examples: tuple[torch.Tensor, ...]
    """The captured plain tensors."""

    uses: tuple[tuple[InputUse, ...], ...]
    """How the graph uses each of them."""

    requires_grad: bool | None
    """None if either is right."""

    shape: torch.Size | None
    """Of a plain tensor without dynamic dims and with strides that no use restricts further; None
    for others, which are compared step by step."""

    stride: tuple[int, ...]
    device: torch.device | None


class ArgumentReader:
    """Turns the arguments of calls into plain tensors.

    Args:
        arguments: what a call must pass.
        spec: of the tree of (args, kwargs).
        captured: the fake plain tensors of the arguments, and how the graph uses each.
        shape_env: of dynamic sizes.
        may_require_grad: whether an argument may require a gradient or not, as autograd follows the
            call.
    """

    def __init__(
        self,
        arguments: Sequence[ArgumentSignature],
        spec: pytree.TreeSpec,
        *,
        captured: Sequence[tuple[torch.Tensor, tuple[InputUse, ...]]],
        shape_env: ShapeEnv | None,
        may_require_grad: bool,
    ) -> None:
        self._arguments = arguments
        self._spec = spec
        self._shape_env = shape_env
        self._may_require_grad = may_require_grad
        self._leaves: list[_Leaf] = []
        self._strides_by_shapes: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        start = 0
        for signature in arguments:
            behind = start + (0 if signature.layout is None else signature.layout.num_leaves)
            own = captured[start:behind]
            start = behind
            self._leaves.append(_leaf(signature, own, may_require_grad=may_require_grad))

    def plain_tensors(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, state: Mapping[int, str]
    ) -> list[torch.Tensor]:
        """Return the plain tensors of one call, with the captured strides.

        Args:
            args: of the call.
            kwargs: of the call.
            state: names of the tensors of the state, by their ids.

        Raises:
            InputMismatchError: the arguments differ from the captured ones; each is listed.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self._spec:
            differences = structure_differences(self._spec, self._arguments, spec, leaves)
            raise InputMismatchError(
                "the arguments have another structure than the captured ones:\n  "
                + "\n  ".join(differences)
            )
        flat: list[torch.Tensor] = []
        problems: list[str] = _identity_problems(
            self._arguments, leaves, state, may_require_grad=self._may_require_grad
        )
        dynamic: list[tuple[_Leaf, torch.Tensor, int]] = []
        for leaf, want in zip(leaves, self._leaves, strict=True):
            if (
                type(leaf) in PLAIN_TYPES
                and not leaf.is_nested
                and leaf.shape == want.shape
                and leaf.dtype is want.signature.dtype
                and want.requires_grad in (None, leaf.requires_grad)
                and not (want.requires_grad and has_hooks(leaf))
                and leaf.layout is torch.strided
                and leaf.stride() == want.stride
                and leaf.device == want.device
                and not leaf.is_conj()
                and not leaf.is_neg()
                and not leaf.__dict__
            ):
                flat.append(leaf)
                continue
            name = want.signature.name
            if not want.signature.is_tensor:
                if not same_constant(leaf, want.signature.constant):
                    problems.append(
                        f"{name}: {leaf!r}, captured with the constant "
                        f"{want.signature.constant!r}; pass a tensor if it must vary"
                    )
                continue
            if problem := _problem(leaf, want):
                problems.append(f"{name}: {problem}")
                continue
            if None in want.signature.shape:
                dynamic.append((want, leaf, len(flat)))
                flat.append(leaf)
                continue
            plain = [leaf] if want.shape is not None else flatten_tensor(leaf)[0]
            for tensor, example, uses in zip(plain, want.examples, want.uses, strict=True):
                given = laid_out(tensor, example, example.stride(), uses)
                if isinstance(given, str):
                    problems.append(f"{name}: {given}")
                else:
                    flat.append(given)
        self._refuse_any(problems)
        if dynamic:
            self._lay_out_dynamic(dynamic, flat)
        return flat

    def _lay_out_dynamic(
        self, dynamic: Sequence[tuple[_Leaf, torch.Tensor, int]], flat: list[torch.Tensor]
    ) -> None:
        """Check dynamic sizes, and give those arguments their strides; each shape is judged once.

        Raises:
            InputMismatchError: a size, or strides, are not allowed.
        """
        key = tuple(tuple(leaf.shape) for _, leaf, _ in dynamic)
        strides = self._strides_by_shapes.get(key)
        is_new = strides is None
        if strides is None:
            sizes = _Sizes(dynamic)
            self._refuse_any(sizes.problems(self._shape_env))
            strides = sizes.strides()
        problems: list[str] = []
        for (want, leaf, position), stride in zip(dynamic, strides, strict=True):
            given = laid_out(leaf, want.examples[0], stride, want.uses[0])
            if isinstance(given, str):
                problems.append(f"{want.signature.name}: {given}")
            else:
                flat[position] = given
        self._refuse_any(problems)
        if is_new:
            self._check_guards(dynamic, flat)
            self._strides_by_shapes[key] = strides

    def _check_guards(
        self, dynamic: Sequence[tuple[_Leaf, torch.Tensor, int]], flat: list[torch.Tensor]
    ) -> None:
        """Dynamic sizes must satisfy what the trace assumed of them."""
        shape_env = self._shape_env
        examples: list[Any] = [each for want in self._leaves for each in want.examples]
        if shape_env is not None and shape_env.evaluate_guards_for_args(examples, flat):
            return
        shapes = ", ".join(f"{want.signature.name} {list(leaf.shape)}" for want, leaf, _ in dynamic)
        guards = "unknown" if shape_env is None else shape_env.format_guards()
        self._refuse_any(
            [f"the dynamic shapes {shapes} break an assumption of the capture: {guards}"]
        )

    def _refuse_any(self, problems: Sequence[str]) -> None:
        if problems:
            raise InputMismatchError(
                "the inputs are not those of the captured step:\n  " + "\n  ".join(problems)
            )


LOST_HOOKS = (
    "has gradient hooks, which a graph does not run; register them inside the step, or change the "
    "gradient that the step returns"
)


def has_hooks(argument: torch.Tensor) -> bool:
    """Return whether a tensor has gradient hooks."""
    return bool(argument._backward_hooks or getattr(argument, "_post_accumulate_grad_hooks", None))


def _leaf(
    signature: ArgumentSignature,
    captured: Sequence[tuple[torch.Tensor, tuple[InputUse, ...]]],
    *,
    may_require_grad: bool,
) -> _Leaf:
    examples = tuple(example for example, _ in captured)
    uses = tuple(uses for _, uses in captured)
    is_plain = signature.layout is not None and signature.layout.subclass is None
    is_plain = is_plain and None not in signature.shape
    example = examples[0] if is_plain else None
    is_lazy = example is not None and (example.is_conj() or example.is_neg())
    is_simple = example is not None and not is_lazy and not reads_offset(uses[0])
    return _Leaf(
        signature=signature,
        examples=examples,
        uses=uses,
        requires_grad=None if may_require_grad else signature.requires_grad,
        shape=example.shape
        if example is not None and is_simple and not signature.attributes
        else None,
        stride=example.stride() if example is not None else (),
        device=examples[0].device if examples else None,
    )


def _problem(leaf: Any, want: _Leaf) -> str | None:
    """Return how a leaf differs from the captured tensor, besides its strides."""
    signature = want.signature
    if not isinstance(leaf, torch.Tensor):
        return f"{leaf!r}, captured as {signature.describe()}"
    if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_quantized:
        kind = "nested" if leaf.is_nested else f"{leaf.dtype} of layout {leaf.layout}"
        return f"{kind}, captured as {signature.describe()}; pass a dense tensor"
    fits = leaf.dtype == signature.dtype and len(leaf.shape) == len(signature.shape)
    if not fits or any(
        size not in (want_size, None) and want_size is not None
        for want_size, size in zip(signature.shape, leaf.shape, strict=True)
    ):
        return f"{leaf.dtype} {list(leaf.shape)}, captured as {signature.describe()}"
    if unknown_subclass(leaf):
        return (
            f"a {type(leaf).__name__}, captured as a plain tensor; pass .as_subclass(torch.Tensor)"
        )
    if want.device is not None and leaf.device != want.device:
        return f"on {leaf.device}, captured on {want.device}; pass .to({str(want.device)!r})"
    layout = flatten_tensor(leaf)[1]
    if signature.layout is not None and not _same_kind(layout, signature.layout):
        return f"{layout.describe()}, captured as {signature.layout.describe()}"
    if want.requires_grad is not None and leaf.requires_grad is not want.requires_grad:
        if want.requires_grad:
            return "requires no gradient, captured with one; pass .requires_grad_()"
        if torch.is_grad_enabled():
            return "requires a gradient, captured without one; pass .detach()"
    if want.requires_grad and has_hooks(leaf):
        return LOST_HOOKS
    now, captured = compared_attributes(leaf), dict(signature.attributes)
    if not is_same(now, captured):
        return (
            f"has the attributes {short(now)}, captured with {short(captured)}; set the captured "
            "ones, or capture again"
        )
    return None


def _identity_problems(
    arguments: Sequence[ArgumentSignature],
    leaves: Sequence[Any],
    state: Mapping[int, str],
    *,
    may_require_grad: bool,
) -> list[str]:
    """Return a sentence for each tensor that is the same as another, and was not, or vice versa."""
    ids = set(map(id, leaves))
    are_different = len(ids) == len(leaves) and state.keys().isdisjoint(ids)
    if are_different and all(each.same_as is None for each in arguments):
        return []
    problems: list[str] = []
    known: dict[int, str] = {}
    for want, leaf in zip(arguments, leaves, strict=True):
        if not want.is_tensor:
            continue
        name = want.name
        first = state.get(id(leaf)) or known.setdefault(id(leaf), name)
        if first == (want.same_as or name):
            continue
        if first != name:
            is_leaf = want.requires_grad and not may_require_grad
            copy = ".detach().requires_grad_()" if is_leaf else ".clone()"
            problems.append(f"{name} is the same tensor as {first}; pass {copy}")
        else:
            problems.append(f"{name} is not {want.same_as}, as captured; pass the same tensor")
    return problems


def _same_kind(found: TensorLayout, captured: TensorLayout) -> bool:
    """Equal up to outer sizes, which the shape check judges."""
    return found.subclass is captured.subclass and (
        found.subclass is None or found.context == captured.context
    )


class _Sizes:
    """The sizes that a call gives to dynamic dims."""

    def __init__(self, dynamic: Sequence[tuple[_Leaf, torch.Tensor, int]]) -> None:
        self._dynamic = dynamic
        self._values: dict[Any, tuple[int, str]] = {}
        self._unequal: list[str] = []
        for want, leaf, _ in dynamic:
            captured: Any
            pairs = zip(want.examples[0].shape, leaf.shape, strict=True)
            for dim, (captured, size) in enumerate(pairs):
                if isinstance(captured, int):
                    continue
                place = f"{want.signature.name} dim {dim}"
                known, where = self._values.setdefault(captured.node.expr, (size, place))
                if known != size:
                    self._unequal.append(
                        f"{place} is {size} and {where} is {known}: these were one size when the "
                        "step was captured; pass equal sizes, or capture with different ones"
                    )

    def problems(self, shape_env: ShapeEnv | None) -> list[str]:
        """Return sizes outside of the captured range, and sizes that should be equal and differ."""
        problems = list(self._unequal)
        for expression, (size, place) in self._values.items():
            if shape_env is not None and expression.is_symbol:
                captured: Any = shape_env.bound_sympy(expression)
                if not captured.lower <= size <= captured.upper:
                    problems.append(_outside_range(place, size, captured))
        return problems

    def strides(self) -> list[tuple[int, ...]]:
        """Return the strides of each argument for these sizes."""
        sizes = {expression: size for expression, (size, _) in self._values.items()}
        found = []
        for want, leaf, _ in self._dynamic:
            captured: Any
            stride: list[int] = []
            for captured, given in zip(want.examples[0].stride(), leaf.stride(), strict=True):
                value = captured
                if isinstance(captured, torch.SymInt):
                    # A stride with a symbol of its own is as given: the guards judge it.
                    value = captured.node.expr.xreplace(sizes)
                    value = int(value) if getattr(value, "is_number", True) else given
                stride.append(value)
            found.append(tuple(stride))
        return found


def _outside_range(place: str, size: int, captured: Any) -> str:
    if size < 2 and captured.lower == 2:
        return (
            f"{place} is {size}; a dynamic dim is captured for sizes of 2 or more, because PyTorch "
            "computes otherwise with 0 and 1; pass a larger size, mark the dim by "
            "torch._dynamo.decorators.mark_unbacked, or capture a step for this size"
        )
    end = f"to {captured.upper}" if captured.upper < 2**62 else "on"
    return (
        f"{place} is {size}, captured for sizes from {captured.lower} {end}; pass such a size, or "
        "capture a step for this one"
    )
