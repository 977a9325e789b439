"""Stack traces of traced nodes, each text made once.

``make_fx`` symbolises, filters and formats the whole Python stack for every node, a fifth of the
time of a capture. Nearly all of a stack is the machinery of PyTorch, and few of the parts that are
kept are distinct: here the kept frames of a stack are found by their code objects, and texts are
looked up by them. The texts are those of ``make_fx``, character by character, but for frames of
this package, and of code that a nested ``torch.compile`` generated (FlexAttention): their names are
numbers that count up in the process, so that equal layers would have unequal traces. What
``make_fx`` leaves without a trace, since no module's forward is on the stack, as a loss that the
step computes itself, gets the innermost line that is neither PyTorch's nor this package's.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import Node

from gt_trace._torch_internals import get_proxy_mode

_DROPPED = ("<eval_with_key>", os.path.dirname(os.path.dirname(__file__)) + os.sep)
_MACHINERY = (*_DROPPED, os.path.dirname(torch.__file__) + os.sep, "<frozen ", copy.__file__)


def is_of_user(code: CodeType) -> bool:
    """Whether code is neither PyTorch's nor this package's, and nobody generated it."""
    return not code.co_filename.startswith(_MACHINERY)


def line_of_user() -> str:
    """Return the innermost running line that ``is_of_user``, as a traceback shows it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return ""
    return "".join(_summary([(frame.f_code, frame.f_lineno)]).format()).rstrip()


@contextmanager
def memoised_stack_traces() -> Iterator[None]:
    """Inside a function that ``make_fx`` traces: write stack traces, the cheap way."""
    mode = get_proxy_mode()
    if mode is None:
        yield
        return
    tracer: Any = mode.tracer
    is_recording = tracer.record_stack_traces
    texts = _Texts(tracer._filter_traceback_frames)
    create_node = tracer.create_node

    def create_node_with_trace(kind: str, *args: Any, **kwargs: Any) -> Node:
        node: Node = create_node(kind, *args, **kwargs)
        if not node.stack_trace and kind not in ("placeholder", "output"):
            text = texts.of(sys._getframe(1))
            if text:
                node.stack_trace = text
        return node

    tracer.record_stack_traces = False
    tracer.create_node = create_node_with_trace
    try:
        yield
    finally:
        tracer.create_node = create_node
        tracer.record_stack_traces = is_recording


class _Texts:
    """Formatted stacks.

    Args:
        keep: the tracer's choice of frames, which it makes frame by frame.
    """

    def __init__(self, keep: Callable[[traceback.StackSummary], traceback.StackSummary]) -> None:
        self._keep = keep
        # By their ids: the hash of a code object is that of its whole code, taken at each question.
        self._kept: dict[int, bool] = {}
        self._texts: dict[tuple[int, ...], str] = {}
        self._held: list[CodeType] = []

    def of(self, frame: FrameType | None) -> str:
        """The stack from the outermost kept frame to the innermost, or one line of the user's."""
        kept: list[tuple[CodeType, int]] = []
        innermost: list[tuple[CodeType, int]] = []
        known = self._kept
        while frame is not None:
            code = frame.f_code
            is_kept = known.get(id(code))
            if is_kept is None:
                self._held.append(code)
                is_kept = known[id(code)] = not code.co_filename.startswith(_DROPPED) and bool(
                    self._keep(_summary([(code, frame.f_lineno)]))
                )
            if is_kept:
                kept.append((code, frame.f_lineno))
            elif not (kept or innermost) and is_of_user(code):
                innermost.append((code, frame.f_lineno))
            frame = frame.f_back
        frames = kept or innermost
        key = tuple([number for code, line in frames for number in (id(code), line)])
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = "".join(_summary(reversed(frames)).format()).strip()
        return text


def _summary(frames: Any) -> traceback.StackSummary:
    return traceback.StackSummary.from_list(
        [traceback.FrameSummary(code.co_filename, line, code.co_name) for code, line in frames]
    )
