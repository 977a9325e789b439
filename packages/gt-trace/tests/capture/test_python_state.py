"""Objects of every kind that a step changes are noticed, named and put back."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import enum
import functools
import itertools
import logging
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gt_trace import CaptureError, trace_step

numpy = pytest.importorskip("numpy")


class Settings:
    count = 0
    __private = 0

    @classmethod
    def bump(cls) -> int:
        cls.count += 1
        return cls.count


class Meta(type):
    count = 0


class Made(metaclass=Meta):
    made = 0

    def __init__(self) -> None:
        Made.made += 1


class Color(enum.Enum):
    RED = 1


class Private:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def bump(self) -> int:
        self.__count += 1
        return self.__count


def attributed(kind: type) -> Any:
    """Return a subclass that counts its calls in an attribute."""

    def counts(self: Any) -> int:
        self.calls = getattr(self, "calls", 0) + 1
        return int(self.calls)

    return type("Attributed", (kind,), {"__call__": counts})()


PARTIAL = functools.partial(lambda: setattr(PARTIAL, "count", PARTIAL.count + 1) or 1)
PARTIAL.count = 0  # type: ignore[attr-defined]  # a user's
ORDERED = collections.OrderedDict(first=1, second=2)
ROTATED = {"first": 1, "second": 2}
DEFAULTS = collections.defaultdict(lambda: puts(NUMBERS, "n")())


def moves() -> int:
    ORDERED.move_to_end(next(iter(ORDERED)))
    return next(iter(ORDERED.values()))


def rotates() -> int:
    key = next(iter(ROTATED))
    ROTATED[key] = ROTATED.pop(key)
    return ROTATED[key]


class Whole(int):
    count = 0


class Scale(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Scale.count += 1
        return x * Scale.count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Scale.count


Color.RED.count = 0
NUMBERS = {"n": 0}
VARIABLE = contextvars.ContextVar("steps", default=0)
THREAD = threading.local()
THREAD.count = 0
OPTIONS = argparse.Namespace(count=0)
CHAIN = collections.ChainMap({"n": 0})
QUEUE: queue.Queue[int] = queue.Queue()
QUEUE.put(0)
LOGGER = logging.getLogger("test_python_state")
LOGGER.count = 0
WHOLE = Whole(3)
WHOLE.count = 0
ARRAY, NUMPY, BYTES = array.array("d", [0.0]), numpy.zeros(2), bytearray(1)
TABLE: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary({Color.RED: 0})
MODULE = types.ModuleType("module_of_test_python_state")
MODULE.count = 0
sys.modules[MODULE.__name__] = MODULE
PRIVATE = Private()


@functools.cache
def stored() -> list[int]:
    return []


@contextmanager
def counting() -> Iterator[None]:
    NUMBERS["n"] += 1
    yield


@torch.no_grad()
def wrapped() -> int:
    NUMBERS["n"] += 1
    return NUMBERS["n"]


def helper() -> int:
    helper.count = getattr(helper, "count", 0) + 1
    return helper.count


def imports() -> int:
    import module_of_test_python_state as module

    module.count += 1
    return module.count


def named() -> int:
    sys.modules["module_of_test_python_state"].count += 1
    return MODULE.count


def fills() -> float:
    NUMPY[:] += 1
    return float(NUMPY[0])


def takes() -> int:
    count = QUEUE.get()
    QUEUE.put(count + 1)
    return count


def sets(target: Any, name: str) -> Callable[[], Any]:
    def change() -> Any:
        setattr(target, name, getattr(target, name) + 1)
        return getattr(target, name)

    return change


def puts(target: Any, key: Any) -> Callable[[], Any]:
    def change() -> Any:
        target[key] += 1
        return target[key]

    return change


def advances(iterator: Iterator[Any]) -> Callable[[], Any]:
    return lambda: next(iterator)


def generates() -> Iterator[int]:
    yield from itertools.count()


def with_contexts() -> int:
    with counting():
        return NUMBERS["n"]


def appends() -> int:
    stored().append(1)
    return len(stored())


def sets_variable() -> int:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def sets_environment() -> int:
    os.environ["TEST_PYTHON_STATE"] = os.environ.get("TEST_PYTHON_STATE", "") + "1"
    return len(os.environ["TEST_PYTHON_STATE"])


def sets_torch() -> int:
    torch.test_python_state = getattr(torch, "test_python_state", 0) + 1
    return torch.test_python_state


def makes() -> int:
    Made()
    return Made.made


CHANGES: list[tuple[Callable[[], Any], str]] = [
    (Settings.bump, "Settings.count was 0, and became 1"),
    (sets(Settings, "_Settings__private"), "Settings._Settings__private was 0, and became 1"),
    (sets(Meta, "count"), "Meta.count was 0, and became 1"),
    (makes, "Made.made was 0, and became 1"),
    (sets(Color.RED, "count"), "count was 0, and became 1"),
    (PRIVATE.bump, "_Private__count was 0, and became 1"),
    (sets(WHOLE, "count"), "count was 0, and became 1"),
    (sets(THREAD, "count"), "count was 0, and became 1"),
    (sets(OPTIONS, "count"), "count was 0, and became 1"),
    (sets(LOGGER, "count"), "count was 0, and became 1"),
    (sets(MODULE, "count"), "module_of_test_python_state.count was 0, and became 1"),
    (imports, "module_of_test_python_state.count was 0, and became 1"),
    (named, "module_of_test_python_state.count was 0, and became 1"),
    (puts(CHAIN, "n"), ".maps[0]['n'] was 0, and became 1"),
    (puts(TABLE, Color.RED), ".data[<Color.RED: 1>] was 0, and became 1"),
    (puts(ARRAY, 0), "was array('d', [0.0]), and became array('d', [1.0])"),
    (puts(BYTES, 0), r"was bytearray(b'\x00'), and became bytearray(b'\x01')"),
    (fills, "NUMPY was array([0., 0.]), and became array([1., 1.])"),
    (takes, "QUEUE.queue[0] was 0, and became 1"),
    (appends, "the cache of stored"),
    (with_contexts, "NUMBERS['n'] was 0, and became 1"),
    (wrapped, "NUMBERS['n'] was 0, and became 1"),
    (helper, "helper.count is new: 1"),
    (sets_variable, "the context variable steps was 0, and became 1"),
    (sets_environment, "os.environ['TEST_PYTHON_STATE'] is new: '1'"),
    (sets_torch, "torch.test_python_state is new: 1"),
    (functools.partial(puts(NUMBERS, "n")), "['n'] was 0, and became 1"),
    (puts(types.SimpleNamespace(n=[0]).n, 0), "[0] was 0, and became 1"),
    *(
        (attributed(kind), "calls is new: 1")
        for kind in (list, set, tuple, dict, collections.deque, frozenset)
    ),
    (PARTIAL, "count was 0, and became 1"),
    (moves, "ORDERED was ['first', 'second'], and became ['second', 'first']"),
    (rotates, "ROTATED was ['first', 'second'], and became ['second', 'first']"),
    (lambda: DEFAULTS["new"], "NUMBERS['n'] was 0, and became 1"),
]
ADVANCES = [
    (advances(iter([1, 2, 3])), "has advanced: <list_iterator"),
    (advances(iter(range(3))), "has advanced: <range_iterator"),
    (advances(itertools.count()), "has advanced: count("),
    (advances(itertools.cycle([1, 2])), "has advanced: <list_iterator"),
    (advances(enumerate([1, 2])), "has advanced: <enumerate"),
    (advances(zip([1, 2], [3, 4], strict=True)), "has advanced: <list_iterator"),
    (advances(iter({1: 2, 3: 4})), "has advanced: <dict_keyiterator"),
    (advances(generates()), "has advanced: <generator object generates"),
]


def refusal(scale: Callable[[], Any]) -> str:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match="the step changes Python objects") as error:
        trace_step(lambda x: (model(x) * torch.tensor(scale()).sum()).sum().detach(), module=model)(
            torch.ones(2, 4)
        )
    return str(error.value)


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_change_is_refused_by_the_name_of_its_holder_and_undone(
    change: Callable[[], Any], expected: str
) -> None:
    stored().clear()
    assert expected in refusal(change)
    assert (expected in refusal(change)) or change is helper  # a second time as the first
    assert (NUMBERS["n"], VARIABLE.get(), Settings.count, Made.made) == (0, 0, 0, 0)
    assert (NUMPY.tolist(), BYTES, ARRAY[0], CHAIN["n"], stored()) == ([0, 0], b"\0", 0, 0, [])
    assert [*ORDERED] == [*ROTATED] == ["first", "second"]
    assert "TEST_PYTHON_STATE" not in os.environ
    assert not hasattr(torch, "test_python_state")


@pytest.mark.parametrize(("advance", "expected"), ADVANCES)
def test_iterator_that_advances_is_refused(advance: Callable[[], Any], expected: str) -> None:
    assert expected in refusal(advance)


def test_position_of_an_iterator_is_put_back_where_it_can_be() -> None:
    numbers = iter([1, 2, 3])
    refusal(lambda: next(numbers))
    assert list(numbers) == [1, 2, 3]


def test_function_of_an_autograd_class_is_searched() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"Scale\.count was 0, and became 1"):
        trace_step(lambda x: Scale.apply(model(x)).sum().detach(), module=model)(torch.ones(2, 4))
    assert Scale.count == 0


def test_attribute_of_a_result_is_refused() -> None:
    def step(x: Tensor) -> dict[str, Tensor]:
        result = x * 2
        result.tag = 5  # type: ignore[attr-defined]  # a user's
        return {"y": result}

    with pytest.raises(CaptureError, match=r"result\['y'\] has the attribute tag"):
        trace_step(step)(torch.ones(2))


def test_reading_and_harmless_caches_are_no_refusal() -> None:
    @functools.lru_cache(maxsize=4)
    def sizes(n: int) -> list[int]:
        return [n, n]

    model, position = nn.Linear(4, 4), iter([1, 2])
    model.scales = NUMPY + 2.0
    model.unused = position

    def step(x: Tensor) -> Tensor:
        LOGGER.info("a step")
        scale = float(model.scales.sum()) + sizes(x.shape[0])[0] + Color.RED.value
        return (model(x) * scale * len(CHAIN)).sum().detach()

    x = torch.ones(2, 4)
    assert torch.equal(trace_step(step, module=model)(x).bind(model)(x), step(x))
