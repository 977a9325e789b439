"""Changes of Python objects that a replay would lose: undone after each run, and refused.

A forward that keeps a tensor in an attribute, fills a list or counts its calls runs once while it
is captured. A replay runs no Python. So every object is put back as it was before the run. A change
is no reason to refuse if its value equals the one before. Nor is one that settles: a second run
changes nothing more, and computes the same graph.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from gt_trace.capture.python_holders import ITERATOR, MAPPING, MISSING, Change, Holder, short
from gt_trace.capture.python_state import HOOKS, PythonState, tensors_of
from gt_trace.capture.random_state import current_watch
from gt_trace.capture.read_values import ReadValues
from gt_trace.capture.stand_ins import eager_types
from gt_trace.errors import CaptureError


class _WithGraph(Protocol):
    @property
    def graph_module(self) -> GraphModule: ...


Captured = TypeVar("Captured", bound=_WithGraph)

_MOST_LINES = 20


class PythonChanges:
    """The changes that one capture made to Python objects, all of them undone.

    Args:
        module: the captured module. Where a run installs hooks in it, its changes remain, since
            ``with_settled_hooks`` captures again.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._roots: Mapping[str, object] = {}
        self._state: PythonState | None = None
        self._left: list[tuple[Holder, dict[Any, Any]]] = []
        self.found: list[Change] = []
        self.never_settle = False
        """Whether objects hold tensors of the trace, or iterators have advanced."""

    @contextmanager
    def undone(
        self, roots: Mapping[str, object], *, optimizer: torch.optim.Optimizer | None = None
    ) -> Iterator[None]:
        """Put all Python objects back that are changed inside, and watch reachable generators.

        Args:
            roots: see ``PythonState``.
            optimizer: see ``PythonState``.
        """
        self._roots = roots
        self._state = state = PythonState(roots, optimizer=optimizer)
        current_watch().add(state.generators)
        hooks, are_kept = _hooks_in(self._module), False
        try:
            with eager_types(state.type_readers.values()), state.noted_reads():
                yield
            found = state.changes()
            self.never_settle = any(
                change.holder.kind is ITERATOR or tensors_of(change.after) for change in found
            )
            are_kept = _hooks_in(self._module) != hooks and not self.never_settle
            if not are_kept:
                self.found = found
        finally:
            if not are_kept:
                self._left = state.restore()

    def values_read(self) -> ReadValues:
        """Return the values outside of tensors that the step may have read."""
        state, self._state = self._state, None
        return ReadValues(self._roots, state)

    def keep(self) -> None:
        """Make the changes again."""
        for holder, after in self._left:
            _write_changed(holder, holder.before, after)

    def take_back(self) -> None:
        """Undo the changes again, after ``keep``."""
        for holder, after in self._left:
            _write_changed(holder, after, holder.before)

    def refuse(self) -> None:
        """Refuse the changes.

        Raises:
            CaptureError: lists every change.
        """
        lines = list(dict.fromkeys(map(_line, self.found)))
        more = [f"... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        raise CaptureError(
            "the step changes Python objects, and a replay runs no Python, so that it would lose "
            "this:\n  "
            + "\n  ".join(lines[:_MOST_LINES] + more)
            + "\nReturn from the step what is "
            "needed after it. Keep a state in buffers that are updated in place (copy_). Delete "
            "what only the step needs before it ends. If the model fills a cache, run it once "
            "before the capture"
        )


def _write_changed(holder: Holder, was: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Change the places of an object in which two contents differ, and leave all others alone.

    A trace annotates methods of modules, which both contents hold and the module no longer does.
    """
    held = holder.kind.read(holder.target)
    for key in {**was, **now}:
        if was.get(key, MISSING) is now.get(key, MISSING):
            continue
        if key in now:
            held[key] = now[key]
        else:
            held.pop(key, None)
    if holder.kind is MAPPING:
        held = {key: held[key] for key in {**now, **held} if key in held}
    holder.kind.write(holder.target, held)


def with_settled_objects(
    module: nn.Module | None, capture: Callable[[PythonChanges], Captured]
) -> Captured:
    """Capture again if the step changed Python objects while it ran for the first time.

    Args:
        module: the captured module.
        capture: makes the capture, and notes changes.

    Returns:
        The capture of a step that leaves all objects as they are. If it had to run twice for that,
        the changes of its first run remain.

    Raises:
        CaptureError: the step changes objects whenever it runs, or computes something else
            afterwards. Lists every change.
    """
    changes, again = PythonChanges(module), PythonChanges(module)
    captured = capture(changes)
    if not changes.found:
        return captured
    if changes.never_settle:
        changes.refuse()
    changes.keep()
    settled = False
    try:
        second = capture(again)
        settled = not again.found and _same_graphs(captured.graph_module, second.graph_module)
    finally:
        if not settled:
            changes.take_back()
    if not settled:
        changes.refuse()
    return second


def _same_graphs(ours: GraphModule, theirs: GraphModule) -> bool:
    """Whether two graphs have the same operators on the same operands, in the same order."""
    return _lines_of(ours) == _lines_of(theirs)


def _lines_of(graph_module: GraphModule) -> list[object]:
    lines: list[object] = []
    for node in graph_module.graph.nodes:
        held = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, GraphModule):
            lines.append(_lines_of(held))
        if isinstance(held, torch.Tensor):
            lines.append((id(held), held.tolist() if held.numel() == 1 else None))
        lines.append((node.op, str(node.target), str(node.args), str(node.kwargs)))
    return lines


def _hooks_in(module: nn.Module | None) -> list[int]:
    """The numbers of the hooks of all modules, which PyTorch gives once."""
    modules = [] if module is None else module.modules()
    return [number for each in modules for table in HOOKS for number in getattr(each, table)]


def _line(change: Change) -> str:
    place = change.holder.place(change.key)
    where = _where_set(change) + _remedy(change)
    if change.holder.kind is ITERATOR:
        return f"{place} has advanced: {short(change.holder.target)}"
    if change.before is MISSING:
        return f"{place} is new: {_shown(change.after)}{where}"
    if change.after is MISSING:
        return f"{place} was {_shown(change.before)}, and is gone{where}"
    before, after = _shown(change.before), _shown(change.after)
    if before == after and before.startswith("a "):
        after = f"another {before[2:]}"
    return f"{place} was {before}, and became {after}{where}"


def _remedy(change: Change) -> str:
    """Return what replaces hooks of PyTorch that assign a weight before each forward."""
    hooks = getattr(change.holder.target, "_forward_pre_hooks", None) or {}
    for hook in hooks.values():
        package, _, name = type(hook).__module__.rpartition(".")
        if package == "torch.nn.utils" and name in ("weight_norm", "spectral_norm"):
            return f"; use torch.nn.utils.parametrizations.{name}, which assigns nothing"
    return ""


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if not isinstance(value, bool | int | float | complex | str | None) and tensors_of(value):
        return f"a {type(value).__name__} with tensors"
    if isinstance(value, nn.Module | types.FunctionType):
        return f"a {type(value).__name__}"
    return short(value)


def _where_set(change: Change) -> str:
    """The line that sets an attribute, as far as the code of its class shows it."""
    target = change.holder.target
    for kind in type(target).__mro__:
        for function in vars(kind).values():
            if not isinstance(function, types.FunctionType) or function.__name__ == "__init__":
                continue
            line = None
            for instruction in dis.get_instructions(function.__code__):
                line = instruction.starts_line or line
                if instruction.opname == "STORE_ATTR" and instruction.argval == change.key:
                    return f" ({function.__code__.co_filename}:{line})"
    return ""
