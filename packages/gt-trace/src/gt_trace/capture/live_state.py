"""Live tensors of a module that a step read before it was traced, as in a list of its parameters.

While a step is traced the module holds stand-ins of its parameters and buffers. A step that holds
the live ones too, by closure, would have them differentiated apart: its gradients would silently be
None. Every torch function that is given a live tensor takes its stand-in instead. Where one cannot
be found, as that of a view that was made before the trace, the step is refused.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gt_trace._torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    get_proxy_mode,
    proxy_call,
)
from gt_trace.capture.given_tensors import GivenTensors, refuse_data_assignments
from gt_trace.capture.input_uses import InputUse
from gt_trace.capture.module_state import StateSlot
from gt_trace.capture.purity import refusal_of, values_needed
from gt_trace.capture.singular_values import VALUES_OF, computes_values, without_vectors
from gt_trace.capture.stack_traces import is_of_user, line_of_user
from gt_trace.capture.stand_ins import copied, is_plain
from gt_trace.capture.thread_settings import (
    ATTENTION,
    checks_for_nan,
    refuse_fast_path,
    refuse_modes,
)
from gt_trace.capture.written_views import InBackward, WrittenViews
from gt_trace.errors import CaptureError

_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

_FORMATTING = (torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__reduce_ex__)

_LAYOUT_READS: Mapping[Any, InputUse] = {
    torch.Tensor.stride: "strides",
    torch.Tensor.dim_order: "strides",
    torch.Tensor.is_contiguous: "contiguity",
    torch.Tensor.storage_offset: "offset",
}
"""Functions by which Python reads how a tensor lies in memory, with what each reads."""

_MEMORY = (
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage),
    *(torch.Tensor.is_set_to, torch.Tensor._is_view),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("_base", "_version")),
)
"""Functions by which Python reads in which memory a tensor lies, or how often it was written."""

_IS_LEAF = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]  # a descriptor
_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # likewise

_CHECKED = frozenset(
    {*VALUES_OF, *_DIFFERENTIATING, *_FORMATTING, *_LAYOUT_READS, *_MEMORY}
    | {ATTENTION, _IS_LEAF, _GRADIENT, functional.one_hot}
)


class LiveState(TorchFunctionMode):
    """Inside, torch functions take the stand-ins of live tensors.

    Args:
        slots: where the state lives.
        stand_ins: one for each slot.
        absent: parts of the module's state for which there is none, since the module is shortened.
        given: the stand-ins of state and arguments.
    """

    def __init__(
        self,
        slots: Sequence[StateSlot],
        stand_ins: Sequence[torch.Tensor],
        *,
        absent: Iterable[StateSlot] = (),
        given: GivenTensors | None = None,
    ) -> None:
        super().__init__()
        self._stand_ins = {
            id(slot.tensor): tensor for slot, tensor in zip(slots, stand_ins, strict=True)
        }
        self._names = {id(slot.tensor): f"{slot.entry.kind} {slot.entry.name}" for slot in slots}
        self._absent = {id(slot.tensor): slot.entry.name for slot in absent}
        self._given = given
        self._by_id = {} if given is None else given.by_id
        self._assignments = refuse_data_assignments({} if given is None else given.names)
        self._live = {id(tensor): key for key, tensor in self._stand_ins.items()}
        self._views = WrittenViews()
        self._functions = self._views.in_functions()
        self._failed: list[Node] = []
        """Nodes whose operator raised an error."""

        self._errors: list[Exception] = []
        """Errors of torch functions, of which the step may catch some."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return self._called(func, args, kwargs)
        except Exception as error:
            self._errors.append(error)
            self._failed += _failed_nodes(error)
            raise

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        if func is torch.Tensor.__deepcopy__ and is_plain(args[0]):
            return copied(self._replaced(args[0]), args[1])
        if func is torch.Tensor.__eq__ and self._is_itself(*args):
            raise CaptureError(
                "the step looks for a tensor of the module in a dictionary or a set that was made "
                "outside, and a capture has other tensors in the places of the module's:\n"
                f"{line_of_user()}\nUse names as keys, or make the dictionary or the set inside "
                "the step"
            )
        args = self._replaced(args)
        # Dynamo, which reads this for torch.cond, does not know the question about inference mode.
        if not torch.compiler.is_dynamo_compiling() and (
            torch.is_inference_mode_enabled() or checks_for_nan()
        ):
            refuse_modes(line_of_user())
        if func in _CHECKED:
            if func == _IS_LEAF and id(args[0]) in self._by_id:
                return self._by_id[id(args[0])].is_leaf
            self._check(func, args, kwargs or {})
        named = self._replaced(dict(kwargs)) if kwargs else {}
        if torch.compiler.is_dynamo_compiling():
            return self.call(func, args, named)
        args, named = self._views.renewed(func, args, named)
        with self._around(func, args, named):
            result = self.call(func, args, named)
        return self._views.returned(result, args)

    def _around(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        if func not in _CHECKED:
            return nullcontext()
        if func in _DIFFERENTIATING:
            return InBackward(self._views)
        return without_vectors() if computes_values(func, args, kwargs) else nullcontext()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that has been given stand-ins; a mode that does more does it here.

        One mode costs less than two: torch functions are the reading of every size, too.
        """
        return func(*args, **kwargs)

    def refuse_live_leaves(self, differentiated: Any) -> None:
        """Refuse tensors whose gradients would go to live tensors, past the trace.

        Args:
            differentiated: a tensor or a sequence of them.

        Raises:
            CaptureError: lists every such live tensor.
        """
        several = isinstance(differentiated, list | tuple)
        outputs = differentiated if several else [differentiated]
        with DisableTorchFunction():
            reached = [
                self._names[id(leaf)] for leaf in _leaves(outputs) if id(leaf) in self._names
            ]
        if reached:
            raise CaptureError(
                "gradients would be lost: the step differentiates with respect to tensors of the "
                "module that it does not read from the module while it runs, but holds a view of "
                "from before, or passes to an autograd.Function from outside; read them from the "
                "module inside the step:\n  " + "\n  ".join(sorted(reached))
            )

    def __enter__(self) -> LiveState:
        self._assignments.__enter__()
        self._functions.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's
        self._functions.__exit__(kind, error, trace)
        self._assignments.__exit__(kind, error, trace)
        if kind is None and self._errors:
            self._refuse_caught()
            _refuse_failed_writes(self._failed)
            _erase_failed_nodes()

    def _refuse_caught(self) -> None:
        """Refuse a step that went on after an error of the trace, as if it were one of its own."""
        for error in self._errors:
            # The frame that caught an error is the outermost one of its traceback.
            caught_in = error.__traceback__
            if caught_in is None or not is_of_user(caught_in.tb_frame.f_code):
                continue
            if refusal := refusal_of(error):
                raise CaptureError(
                    "the step catches an error that only its capture raises, and goes on: "
                    f"{refusal}"
                ) from error

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func is ATTENTION:
            refuse_fast_path([*args, *kwargs.values()])
        elif func in _DIFFERENTIATING:
            self.refuse_live_leaves(args[0])
        elif func in (_IS_LEAF, _GRADIENT):
            if func == _GRADIENT and id(args[0]) in self._by_id:
                self._by_id[id(args[0])].refuse_stale_gradient()
        elif func is functional.one_hot:
            _check_classes(*args, **kwargs)
        elif func in _FORMATTING:
            if line := _formatting_line():
                raise CaptureError(values_needed(func.__qualname__, line))
        elif (func in _MEMORY or func in _LAYOUT_READS) and _is_called_by_user(func.__name__):
            if func in _MEMORY:
                name = getattr(func, "__self__", func).__name__
                what = "how often a tensor was written" * (name == "_version")
                raise CaptureError(
                    f"the step reads {what or 'in which memory a tensor lies'} (Tensor.{name}), "
                    f"which another call has otherwise:\n{line_of_user()}\nCompare tensors by "
                    "`is`, count bytes by numel() * element_size(), or read it outside of the step"
                )
            if self._given is not None:
                self._given.note_layout_read(args[0], _LAYOUT_READS[func])

    def _is_itself(self, one: Any, other: Any) -> bool:
        """Return whether one is a live tensor, and the other one is its stand-in."""
        return id(other) in (self._live.get(id(one)), id(self._stand_ins.get(id(one))))

    def _replaced(self, value: Any) -> Any:
        kind = type(value)
        # No subclasses: sizes and named tuples hold no live tensors.
        if kind is tuple or kind is list:
            return kind([self._replaced(each) for each in value])
        if isinstance(value, torch.Tensor):
            if id(value) in self._absent:
                raise CaptureError(
                    f"{self._absent[id(value)]} is read from outside of the module; read "
                    "parameters from the module inside the step"
                )
            return self._stand_ins.get(id(value), value)
        if kind is dict:
            return {key: self._replaced(each) for key, each in value.items()}
        return value


def _check_classes(tensor: torch.Tensor, num_classes: object = -1) -> None:
    """Record the check of eager execution that numbers of classes are within bounds."""
    if isinstance(num_classes, int) and num_classes > 0 and isinstance(tensor, FakeTensor):
        torch._assert_async(tensor.ge(0).all(), "Class values must be non-negative.")
        torch._assert_async(
            tensor.lt(num_classes).all(), "Class values must be smaller than num_classes."
        )


def _failed_nodes(error: Exception) -> list[Node]:
    """Return the nodes that the tracer had made when their operator raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = proxy_call.__code__  # makes a node, and then runs the node's operator
    made = [each.f_locals.get("proxy_out") for each in frames if each.f_code is code]
    return [each.node for each in made if isinstance(each, Proxy)]


def _refuse_failed_writes(failed: Iterable[Node]) -> None:
    """Refuse errors, which the step caught, of operators that may have written before they failed.

    An operator without a result, as those on lists of tensors, writes one operand after the other.

    Raises:
        CaptureError: names the operators.
    """
    targets = {str(node.target) for node in failed if not _returns(node)}
    if targets:
        raise CaptureError(
            f"the step catches an error of {', '.join(sorted(targets))}, which may have written "
            "some of its operands before; call it with operands that fit"
        )


def _returns(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.returns)


def _erase_failed_nodes() -> None:
    """Erase nodes of operators that raised an error, which the step caught.

    They have no value, though their operator returns one. An assertion, or an operator that only
    writes, returns none.
    """
    mode = get_proxy_mode()
    nodes = [] if mode is None else [*mode.tracer.graph.nodes]
    for node in reversed(nodes):
        has_failed = "val" not in node.meta and _returns(node)
        if node.op == "call_function" and not node.users and has_failed:
            node.graph.erase_node(node)


def _is_called_by_user(name: str) -> bool:
    """Return whether the function that a mode sees was called from the user's code."""
    passing = (name, "_called", "__torch_function__", "handle_torch_function")
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in passing:
        frame = frame.f_back
    return frame is not None and is_of_user(frame.f_code)


def _formatting_line() -> str:
    """Return the line of the user's code that prints or stores a tensor; "" if PyTorch does."""
    frame: FrameType | None = sys._getframe(4)
    while frame is not None and frame.f_code.co_filename.endswith(_TENSORS_OWN):
        frame = frame.f_back
    if frame is None or not is_of_user(frame.f_code) or "/logging/" in frame.f_code.co_filename:
        return ""
    return line_of_user()


_TENSORS_OWN = (
    *(f"torch/{file}.py" for file in ("_tensor", "overrides", "nn/parameter", "serialization")),
    copy.__file__,
)


def _leaves(outputs: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that gradients of ``outputs`` would be added to, each once."""
    pending = [each.grad_fn for each in outputs if isinstance(each, torch.Tensor)]
    seen: set[Any] = set()
    leaves: list[torch.Tensor] = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
        pending.extend(child for child, _ in node.next_functions)
    return leaves
