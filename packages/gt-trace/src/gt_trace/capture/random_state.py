"""Check that a step leaves random number generators alone while it is captured.

A replay runs operators and nothing else. No operator sets a generator, and numbers that Python or
NumPy drew are constants of the graph. Both are found by comparing the states of generators.
Operators draw nothing while they are captured; here each advances its generator, so that a state
that is set back between two draws differs at the second. Afterwards all states are as before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.fx import Node

from gt_trace._torch_internals import DisableTorchFunction, get_proxy_mode, no_dispatch
from gt_trace.capture.random_draws import advances_generator, explicit_generator
from gt_trace.capture.random_generators import HeldGenerator, ambient_generators
from gt_trace.errors import CaptureError

Captured = TypeVar("Captured")

_MOST_CHANGES = 8
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "gt_trace"}) - {"__main__"}

_Line = tuple[str, int, str]
"""A line of code: file, number and function."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A generator, its state before the run, and the state that it has if only operators drew."""

    held: HeldGenerator
    before: Any
    expected: Any

    @classmethod
    def now(cls, held: HeldGenerator) -> _Watched:
        """The generator, moved to a state that no code has seen."""
        before = held.state
        held.advance()
        return cls(held=held, before=before, expected=held.state)


class RandomWatch:
    """Compares the states of generators while a step runs, wherever ``look`` is called.

    Args:
        generators: those to compare.
        finds_lines: whether states are also compared after each line of the user's code.
    """

    def __init__(self, generators: Sequence[HeldGenerator], *, finds_lines: bool = False) -> None:
        self.generators = list(generators)
        self.changes: dict[tuple[str, _Line | None], None] = {}
        """Names of generators that changed, with the line at fault where lines are found."""

        self.num_unknown = 0
        """Number of generators, the last ones, that operators drew from and that were not given."""

        self._finds_lines = finds_lines
        self._watched: dict[int, _Watched] = {}
        self._restore_tracer: Callable[[], None] | None = None
        self._line: _Line | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Restore the states of generators after a step ran inside."""
        with _on_real_tensors():
            self._watched = {each.key: _Watched.now(each) for each in self.generators}
        trace = sys.gettrace()
        try:
            if self._finds_lines:
                sys.settrace(self._enter_frame)
            yield
        finally:
            if self._finds_lines:
                sys.settrace(trace)
            if self._restore_tracer is not None:
                self._restore_tracer()
                self._restore_tracer = None
            with _on_real_tensors():
                for each in self._watched.values():
                    each.held.restore(each.before)

    def look(self) -> None:
        """Compare all states with the expected ones."""
        with _on_real_tensors():
            for each in self._watched.values():
                self._compare(each)

    def add(self, generators: Iterable[HeldGenerator]) -> None:
        """Compare these, too."""
        known = {each.key for each in self.generators}
        added = {each.key: each for each in generators if each.key not in known}
        self.generators[:0] = added.values()  # unknown ones remain the last
        if self._watched:  # a run is under way
            with _on_real_tensors():
                self._watched |= {key: _Watched.now(each) for key, each in added.items()}

    def follow_draws(self) -> None:
        """Compare states wherever the trace in force records an operator that draws."""
        mode = get_proxy_mode()
        if mode is None or self._restore_tracer is not None:
            return
        tracer: Any = mode.tracer
        create_node = tracer.create_node

        def create_followed_node(*args: Any, **kwargs: Any) -> Node:
            node: Node = create_node(*args, **kwargs)
            if advances_generator(node):
                self._draw(node, explicit_generator(node, tracer.root))
            return node

        def restore() -> None:
            tracer.create_node = create_node

        tracer.create_node = create_followed_node
        self._restore_tracer = restore

    def _draw(self, node: Node, explicit: torch.Generator | None) -> None:
        generator = explicit or _default_generator(_device_of(node))
        held = HeldGenerator(name=f"the generator of {node.target} ({node})", generator=generator)
        with _on_real_tensors():
            watched = self._watched.get(held.key)
            if watched is None:
                watched = self._watched[held.key] = _Watched.now(held)
                self.generators.append(held)
                self.num_unknown += 1
            for each in self._watched.values():
                if isinstance(each.before, torch.Tensor):
                    self._compare(each)
            watched.held.advance()
            watched.expected = watched.held.state

    def _compare(self, watched: _Watched) -> None:
        state, expected = watched.held.state, watched.expected
        is_same = torch.equal(state, expected) if torch.is_tensor(state) else state == expected
        if not is_same:
            watched.expected = state
            self.changes[watched.held.name, self._line] = None

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._follow_line if _is_of_user(frame) else None

    def _follow_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.look()
        at = frame.f_back if event == "return" else frame
        if at is not None and _is_of_user(at):
            code = at.f_code
            self._line = (code.co_filename, at.f_lineno, code.co_name)
        return self._follow_line


_current: ContextVar[RandomWatch | None] = ContextVar("_current", default=None)


def current_watch() -> RandomWatch:
    """Return the watch of the capture that is under way."""
    return _current.get() or RandomWatch(())


def with_untouched_generators(capture: Callable[[], Captured]) -> Captured:
    """Capture a step, and check that it neither sets generators nor draws outside of operators.

    Args:
        capture: adds the generators that the step can reach to ``current_watch()``, and makes the
            capture in ``current_watch().running()``. It is called again if an operator drew from
            a generator that was not added, and to find the lines at fault.

    Raises:
        CaptureError: lists each generator that changed, with the line.
    """
    captured, watch = _watched(capture, RandomWatch([*ambient_generators()]))
    if watch.num_unknown:
        # Another run shows whether the step sets them, or makes others each time.
        captured, watch = _watched(capture, RandomWatch(watch.generators))
    if not watch.changes and not watch.num_unknown:
        return captured
    num_known = len(watch.generators) - watch.num_unknown
    made = watch.generators[num_known:]
    again = RandomWatch(watch.generators[:num_known], finds_lines=True)
    with contextlib.suppress(Exception):  # this run is for its lines alone
        _watched(capture, again)
    changes = list(again.changes or watch.changes)
    problems = [f"{name} changed{_at(line)}" for name, line in changes[:_MOST_CHANGES]] + [
        f"{held.name} is made inside of the step" for held in made
    ]
    if len(changes) > _MOST_CHANGES:
        problems.append(f"... and {len(changes) - _MOST_CHANGES} more changes")
    raise CaptureError(
        "the step sets a random number generator, or draws random numbers outside of PyTorch's "
        "operators. A replay runs operators only: it sets no generator, and has numbers that "
        "were drawn as constants. Let operators draw (torch.rand, dropout), if need be from a "
        "torch.Generator that is made and seeded outside of the step; or draw outside of the step, "
        "and pass the numbers as a tensor:\n  " + "\n  ".join(problems)
    )


def _watched(capture: Callable[[], Captured], watch: RandomWatch) -> tuple[Captured, RandomWatch]:
    token = _current.set(watch)
    try:
        return capture(), watch
    finally:
        _current.reset(token)


@contextmanager
def _on_real_tensors() -> Iterator[None]:
    """Keep the modes of a trace out, which would record what is done with states."""
    with no_dispatch(), DisableTorchFunction(), torch.no_grad():
        yield


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of PyTorch for a device; that of the CPU for absent devices."""
    backend: Any = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)
    if backend is None or not backend.is_initialized():
        return torch.default_generator
    index: Any = device.index  # None for the current device
    generators: Sequence[torch.Generator] = backend.default_generators
    number: int = backend.current_device() if index is None else index
    return generators[number]


def _device_of(node: Node) -> torch.device:
    """Return the device of a node whose value is not recorded yet."""
    device = node.kwargs.get("device")
    if isinstance(device, torch.device):
        return device
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _is_of_user(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    # Generated code, as that of named tuples, is of no module that was imported.
    return module in sys.modules and module.partition(".")[0] not in _LIBRARIES


def _at(line: _Line | None) -> str:
    if line is None:
        return ""
    return " at\n" + "".join(StackSummary.from_list([FrameSummary(*line)]).format()).rstrip()
