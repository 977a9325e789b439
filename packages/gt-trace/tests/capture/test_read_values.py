"""Numbers, texts and functions that a step read are compared at each call."""

from __future__ import annotations

import collections
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import multiprocessing
import os
import pathlib
import threading
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gt_trace import CaptureError, StateMismatchError, trace_step
from gt_trace.capture.read_values import ReadValues
from gt_trace.joint import export_joint_graph, partition
from gt_trace.stamping import trace_step_by_stamping

FACTOR = 2.0
VARIABLE = contextvars.ContextVar("factor", default=2.0)
THREAD = threading.local()
THREAD.factor = 2.0
MODULE = types.ModuleType("constants_of_test_read_values")
MODULE.factor = 2.0
os.environ["TEST_READ_VALUES"] = "2"


class Kind(enum.Enum):
    WIDE = 2.0
    NARROW = 1.0


class Settings:
    factor = 2.0


class Rates(list[float]):
    factor = 2.0


def widened(x: Tensor, factor: float = 2.0, *, added: float = 0.0) -> Tensor:
    return x * factor + added


def narrowed(x: Tensor, factor: float = 2.0, *, added: float = 0.0) -> Tensor:
    return x / factor - added


class OfClasses(type):
    def __len__(cls) -> int:
        return 2


class Scaling(metaclass=OfClasses):
    def __call__(self, x: Tensor) -> Tensor:
        return self.shifted(x) * self.slope * len(type(self))

    @property
    def slope(self) -> float:
        return 2.0

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 1


@functools.lru_cache
def cached() -> list[float]:
    return [2.0]


class Model(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.dropout, self.act = nn.Dropout(0.5), nn.ReLU()
        self.scale, self.unread, self.kind = 2.0, 0, Kind.WIDE
        self.config = {"rates": [1.0, 2.0], "nested": types.SimpleNamespace(power=2, unread=1)}
        self.function, self.table = functional.relu, torch.ones(4).numpy()
        self.kinds = {"wide", functional.relu}
        self.rates, self.order = Rates(), {"first": 1.0, "second": 2.0}
        self.scaling = Scaling()
        self.partial = functools.partial(lambda: self.partial.scaled)
        weight: Any = self.linear.weight
        weight.scaled, self.partial.scaled, weight.held = 2.0, 2.0, {"factor": 2.0}  # type: ignore[attr-defined]

    def widen(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        assert "wide" in self.kinds
        x = self.function(self.act(self.dropout(self.norm(self.linear(x)))))
        x = self.scaling(widened(x))
        x = self.widen(x) * self.scale * self.factor * self.config["rates"][1] * self.kind.value
        x = x ** self.config["nested"].power * float(self.table[0]) * getattr(self, "late", 1.0)
        weight: Any = self.linear.weight
        x = x * self.rates.factor * next(iter(self.order.values())) * self.partial() * cached()[0]
        x = x * weight.scaled * weight.held["factor"] * getattr(self.norm.running_mean, "late", 1.0)
        return x * FACTOR * VARIABLE.get() * THREAD.factor * MODULE.factor * Settings.factor


class Trainer:
    def __init__(self) -> None:
        self.model, self.step, self.losses = Model(), 0, [1.0]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.closure = [2.0]

    def train(self, x: Tensor) -> Tensor:
        loss = self.model(x).sum() * int(os.environ["TEST_READ_VALUES"]) * self.closure[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, x: Tensor) -> None:
        self.step += 1
        self.losses.append(float(self.train(x)))


def set_function(name: str, value: Any) -> Callable[[Trainer, pytest.MonkeyPatch], None]:
    return lambda trainer, patch: setattr(trainer.model, name, value)


def rotate(held: dict[str, float]) -> None:
    held["first"] = held.pop("first")


def replace_weight(trainer: Trainer, _: pytest.MonkeyPatch) -> None:
    linear = trainer.model.linear
    held = vars(linear.weight)
    linear.weight = nn.Parameter(linear.weight.detach())
    vars(linear.weight).update(held, scaled=3.0)
    trainer.optimizer.param_groups[0]["params"][0] = linear.weight


CHANGES: dict[str, tuple[Callable[[Trainer, pytest.MonkeyPatch], Any], str]] = {
    "dropout": (lambda t, _: setattr(t.model.dropout, "p", 0.1), "module.dropout.p is 0.1"),
    "momentum": (lambda t, _: setattr(t.model.norm, "momentum", 0.5), "module.norm.momentum"),
    "epsilon": (lambda t, _: setattr(t.model.norm, "eps", 0.5), "module.norm.eps is 0.5"),
    "attribute": (set_function("scale", 3.0), "module.scale is 3.0, and was 2.0"),
    "type": (set_function("scale", 2), "module.scale is 2, and was 2.0"),
    "late": (set_function("late", 3.0), "module.late is 3.0, and was missing"),
    "gone": (lambda t, _: delattr(t.model, "scale"), "module.scale is gone, and was 2.0"),
    "member": (set_function("kind", Kind.NARROW), "module.kind is <Kind.NARROW: 1.0>"),
    "list": (lambda t, _: t.model.config["rates"].__setitem__(1, 5.0), "['rates'][1] is 5.0"),
    "new list": (lambda t, _: t.model.config.update(rates=[1.0, 5.0]), "['rates'][1] is 5.0"),
    "new dict": (set_function("config", {"rates": [1.0, 2.0]}), "config['nested'].power is gone"),
    "longer": (lambda t, _: t.closure.append(1.0), "the length of step.closure is 2"),
    "object": (lambda t, _: setattr(t.model.config["nested"], "power", 3), ".power is 3"),
    "function": (set_function("function", torch.tanh), "module.function is <built-in"),
    "module": (set_function("act", nn.Tanh()), "the class of module.act is 'Tanh'"),
    "array": (lambda t, _: t.model.table.fill(3.0), "module.table is"),
    "closure": (lambda t, _: t.closure.__setitem__(0, 3.0), "step.closure[0] is 3.0"),
    "global": (lambda t, p: p.setitem(globals(), "FACTOR", 3.0), "FACTOR is 3.0"),
    "variable": (lambda t, _: VARIABLE.set(3.0), "the context variable factor is"),
    "thread": (lambda t, p: p.setattr(THREAD, "factor", 3.0), "THREAD.factor is 3.0"),
    "import": (lambda t, p: p.setattr(MODULE, "factor", 3.0), "factor is 3.0"),
    "class": (lambda t, p: p.setattr(Settings, "factor", 3.0), "Settings.factor is 3.0"),
    "class of module": (lambda t, p: p.setattr(Model, "factor", 3.0), "Model.factor is 3.0"),
    "method": (lambda t, p: p.setattr(Model, "widen", lambda _, x: x), "Model.widen is <function"),
    "default": (
        lambda t, p: p.setattr(widened, "__defaults__", (3.0,)),
        "widened.__defaults__ is (3.0,), and was (2.0,)",
    ),
    "keyword default": (
        lambda t, p: p.setattr(widened, "__kwdefaults__", {"added": 3.0}),
        "widened.__kwdefaults__ is {'added': 3.0}, and was {'added': 0.0}",
    ),
    "code, as by the autoreload of a notebook": (
        lambda t, p: p.setattr(widened, "__code__", narrowed.__code__),
        "widened.__code__ is <code object narrowed",
    ),
    "special method": (
        lambda t, p: p.setattr(Scaling, "__call__", lambda _, x: x),
        "Scaling.__call__ is <function",
    ),
    "special method of a metaclass": (
        lambda t, p: p.setattr(OfClasses, "__len__", lambda _: 3),
        "OfClasses.__len__ is <function",
    ),
    "property": (
        lambda t, p: p.setattr(Scaling, "slope", property(lambda _: 3.0)),
        "Scaling.slope is <property",
    ),
    "static method": (
        lambda t, p: p.setattr(Scaling, "shifted", staticmethod(lambda x: x)),
        "Scaling.shifted is <staticmethod",
    ),
    "environment": (lambda t, p: p.setenv("TEST_READ_VALUES", "3"), "os.environ['TEST_READ_VALU"),
    "set": (lambda t, _: t.model.kinds.add("narrow"), "module.kinds is"),
    "attribute of a list": (lambda t, _: setattr(t.model.rates, "factor", 3.0), "rates.factor is"),
    "order": (lambda t, _: rotate(t.model.order), "of keys of module.order is ('second', 'first')"),
    "partial": (lambda t, _: setattr(t.model.partial, "scaled", 3.0), "partial.scaled is 3.0"),
    "cache": (lambda t, _: cached().__setitem__(0, 3.0), "cached[0] is 3.0"),
    "parameter": (
        lambda t, _: setattr(t.model.linear.weight, "scaled", 3.0),
        "module.linear.weight.scaled is 3.0, and was 2.0",
    ),
    "held by a parameter": (
        lambda t, _: t.model.linear.weight.held.update(factor=3.0),
        "module.linear.weight.held['factor'] is 3.0",
    ),
    "late attribute of a buffer": (
        lambda t, _: setattr(t.model.norm.running_mean, "late", 3.0),
        "module.norm.running_mean.late is 3.0, and was missing",
    ),
    "replaced parameter": (replace_weight, "module.linear.weight.scaled is 3.0, and was 2.0"),
    "hook": (lambda t, _: t.optimizer.register_step_post_hook(print), "_post_hooks"),
}


def captured(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    step = trace_step(trainer.train, module=trainer.model, optimizer=trainer.optimizer)
    return step(torch.ones(3, 4)).bind(trainer.model, trainer.optimizer)


@pytest.mark.parametrize("name", CHANGES)
def test_change_from_outside_is_refused_with_both_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = CHANGES[name]
    trainer, x = Trainer(), torch.ones(3, 4)
    step = captured(trainer)
    step(x)
    token = VARIABLE.set(VARIABLE.get())
    change(trainer, monkeypatch)
    with pytest.raises(StateMismatchError, match="not as it was when it was captured") as error:
        step(x)
    VARIABLE.reset(token)
    cached()[0] = 2.0
    assert expected in str(error.value)


def renamed(scaling: Scaling) -> str:
    return "scaling"


def start(scaling: Scaling) -> None:
    """As trackers replace ``__init__``."""


UNREAD: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "text": lambda p: p.setattr(Scaling, "__repr__", renamed),
    "__init__": lambda p: p.setattr(Scaling, "__init__", start),
    "equal property": lambda p: p.setattr(Scaling, "slope", property(vars(Scaling)["slope"].fget)),
    "equal method": lambda p: p.setattr(Scaling, "shifted", staticmethod(Scaling.shifted)),
    "equal code": lambda p: p.setattr(widened, "__code__", widened.__code__.replace()),
    "equal default": lambda p: p.setattr(widened, "__defaults__", (float("2"),)),
}


@pytest.mark.parametrize("name", UNREAD)
def test_methods_that_no_step_reads_and_equal_ones_may_be_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, x = Trainer(), torch.ones(3, 4)
    step = captured(trainer)
    step(x)
    UNREAD[name](monkeypatch)
    step(x)


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor, factor: float = factor) -> Tensor:
        return x * factor * getattr(scale, "times", 1.0)

    return scale


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("how", ["replaced", "defaults", "attribute"])
def test_functions_of_one_name_are_compared_each_for_itself(index: int, how: str) -> None:
    model = nn.Module()
    functions = [scaled_by(2.0), scaled_by(3.0)]
    model.functions = functions  # type: ignore[assignment]
    step = trace_step(lambda x: functions[0](functions[1](x)), module=model)(torch.ones(2))
    bound = step.bind(model)
    if how == "replaced":
        functions[index] = scaled_by(9.0)
    elif how == "attribute":
        functions[index] = scaled_by(2.0 + index)
        functions[index].times = 9.0  # type: ignore[attr-defined]
    else:
        functions[index].__defaults__ = (9.0,)  # type: ignore[attr-defined]
    with pytest.raises(StateMismatchError, match="not as it was when it was captured"):
        bound(torch.ones(2))


def test_values_that_the_step_does_not_read_may_change() -> None:
    trainer, x = Trainer(), torch.ones(3, 4)
    step, before = captured(trainer), dict(vars(trainer.model.config["nested"]))
    trainer.train = step  # type: ignore[method-assign]  # as trainers do
    for count in range(3):
        trainer.run(x)
        trainer.model.unread = count
        trainer.model.noted = count
        trainer.model.scale = float("2")
        trainer.model.config = {**trainer.model.config, "nested": types.SimpleNamespace(**before)}
    assert (trainer.step, len(trainer.losses)) == (3, 4)


def test_values_that_are_the_same_are_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = captured(Trainer()), torch.ones(3, 4)
    step(x)

    def walks(*_: Any) -> None:
        raise AssertionError("a call walked all objects")

    monkeypatch.setattr(ReadValues, "_read", walks)
    step(x)


def test_model_with_another_number_is_refused_when_it_is_bound() -> None:
    model, other, x = Model(), Model(), torch.ones(3, 4)
    other.dropout.p = 0.1
    step = trace_step(lambda x: model(x).sum().detach(), module=model)(x)
    step.bind(Model())
    with pytest.raises(StateMismatchError, match=r"dropout\.p is 0\.1, and was 0\.5 when"):
        step.bind(other)


def test_joint_graphs_and_replicated_layers_refuse_it_too() -> None:
    model, x = Model(), torch.ones(3, 4)
    joint = partition(export_joint_graph(model, (x,))).bind(model)
    joint(x)
    model.dropout.p = 0.1
    with pytest.raises(StateMismatchError, match=r"module\.dropout\.p is 0\.1"):
        joint(x)
    layers = nn.Sequential(*(Model() for _ in range(6)))
    step = trace_step_by_stamping(lambda x: layers(x).sum().detach(), module=layers)(x).step
    bound = step.bind(layers)
    bound(x)
    layers[4].scale = 3.0
    with pytest.raises(StateMismatchError, match=r"module\.4\.scale is 3\.0"):
        bound(x)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        *((np.float32(0.5), np.float32(0.25)), (np.int64(1), np.int64(2))),
        *((np.bool_(1), np.bool_(0)), (decimal.Decimal("0.5"), decimal.Decimal("0.25"))),
    ],
)
def test_numbers_of_other_classes_than_pythons_are_compared(was: Any, now: Any) -> None:
    held = types.SimpleNamespace(factor=was)
    bound = trace_step(lambda x: x * float(held.factor))(torch.ones(2)).bind()
    held.factor = type(was)(was)  # an equal one
    bound(torch.ones(2))
    held.factor = now
    with pytest.raises(StateMismatchError, match=r"factor is .* when the step was captured"):
        bound(torch.ones(2))


def test_what_a_step_reads_of_an_optimizer_that_was_not_captured_is_compared() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    bound = trace_step(lambda x: model(x) * optimizer.param_groups[0]["lr"], module=model)(
        torch.ones(2)
    ).bind(model)
    optimizer.param_groups[0]["momentum"] = 0.25  # is not read
    bound(torch.ones(2))
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(StateMismatchError, match=r"\['lr'\] is 0.25, and was 0.5"):
        bound(torch.ones(2))


@dataclasses.dataclass
class Progress:
    factor: float = 2.0
    num_steps: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.num_steps} steps"


def test_fields_of_a_dataclass_that_only_its_text_and_comparison_read_may_change() -> None:
    progress = Progress()
    bound = trace_step(lambda x: x * progress.factor)(torch.ones(2)).bind()
    progress.num_steps += 1
    progress.losses.append(1.0)
    assert torch.equal(bound(torch.ones(2)), torch.full((2,), 2.0))
    progress.factor = 3.0
    with pytest.raises(StateMismatchError, match=r"factor is 3\.0, and was 2.0"):
        bound(torch.ones(2))


class Scales:
    def __init__(self) -> None:
        self.scale_0, self.scale_1 = 2.0, 3.0


class Frozen(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("the class is frozen")


class OfFrozenClass(Scales, metaclass=Frozen):
    pass


class Redirected:
    def __init__(self) -> None:
        self.held = 2.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "".join(("he", "ld")) if name == "scale" else name)


class WithDefault:
    adapter: Any = None
    factor = 2.0


class OfAnotherClass:
    adapter: Any = None
    factor = 3.0


def _scaled_by(held: list[float]) -> Any:
    def scaled(x: float) -> float:
        return x * held[0]

    scaled.held = held  # type: ignore[attr-defined]
    return scaled


def _class_with(number: float) -> Any:
    class Local:
        factor = number

    return Local


class Pair(ctypes.Structure):
    _fields_ = (("low", ctypes.c_double), ("high", ctypes.c_double))


def _with(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, value)


def _with_item(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, value)


def _scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1, 0.5)


def _next_rate(scheduler: Any) -> None:
    scheduler.optimizer.step()
    scheduler.step()


HELD: dict[str, tuple[Any, Callable[[Any], float], Callable[[Any], object], str]] = {
    "a computed name": (
        Scales(),
        lambda held: getattr(held, f"scale_{len([0])}"),
        _with("scale_1", 4.0),
        r"\.scale_1 is 4\.0, and was 3\.0",
    ),
    "vars": (
        Scales(),
        lambda held: sum(vars(held).values()),
        _with("scale_0", 4.0),
        r"\.scale_0 is 4\.0, and was 2\.0",
    ),
    "an attribute of a class that is frozen": (
        OfFrozenClass(),
        lambda held: held.scale_0,
        _with("scale_0", 4.0),
        r"\.scale_0 is 4\.0, and was 2\.0",
    ),
    "a class that looks up names itself": (
        Redirected(),
        lambda held: held.scale,
        _with("held", 4.0),
        r"\.held is 4\.0, and was 2\.0",
    ),
    "a number of the second of two closures": (
        [_scaled_by([2.0]), _scaled_by([3.0])],
        lambda held: held[0](1.0) * held[1](1.0),
        lambda held: held[0].held.__setitem__(0, 4.0),
        r"is 4\.0, and was 2\.0",
    ),
    "the first of two classes of one name": (
        [_class_with(2.0)(), _class_with(3.0)()],
        lambda held: held[0].factor * held[1].factor,
        lambda held: setattr(type(held[0]), "factor", 4.0),
        r"factor.* is 4\.0, and was 2\.0",
    ),
    "an attribute with the name of one of modules": (
        types.SimpleNamespace(training=True),
        lambda held: 2.0 if held.training else 1.0,
        _with("training", False),
        r"\.training is False, and was True",
    ),
    "the mode of a module that is not captured": (
        nn.Dropout(0.0),
        lambda held: 2.0 if held.training else 1.0,
        nn.Module.eval,
        r"\.training is False, and was True",
    ),
    "a class": (
        types.SimpleNamespace(kind=nn.ReLU),
        lambda held: 2.0 if held.kind is nn.ReLU else 1.0,
        _with("kind", nn.Tanh),
        r"\.kind is .*Tanh'>, and was .*ReLU'>",
    ),
    "an operator": (
        types.SimpleNamespace(act=torch.ops.aten.relu),
        lambda held: float(held.act(torch.tensor(2.0)).numel()),
        _with("act", torch.ops.aten.tanh),
        r"\.act is .*tanh.*, and was .*relu",
    ),
    "an object in place of nothing": (
        WithDefault(),
        lambda held: 1.0 if held.adapter is None else 2.0,
        _with("adapter", Scales()),
        r"the class of .*\.adapter is 'Scales', and was missing",
    ),
    "a tensor in place of nothing": (
        WithDefault(),
        lambda held: 1.0 if held.adapter is None else 2.0,
        lambda held: setattr(held, "adapter", torch.ones(1)),
        r"the class of .*\.adapter is 'Tensor', and was missing",
    ),
    "a class that is assigned": (
        [WithDefault()],
        lambda held: held[0].factor,
        lambda held: setattr(held[0], "__class__", OfAnotherClass),
        r"OfAnotherClass\.factor is 3\.0|factor is gone",
    ),
    "a copy": (
        Scales(),
        lambda held: copy.copy(held).scale_0,
        _with("scale_0", 4.0),
        r"\.scale_0 is 4\.0, and was 2\.0",
    ),
    "a deep copy": (
        Scales(),
        lambda held: copy.deepcopy(held).scale_0,
        _with("scale_0", 4.0),
        r"\.scale_0 is 4\.0, and was 2\.0",
    ),
    "object.__getattribute__": (
        Scales(),
        lambda held: object.__getattribute__(held, "scale_0"),
        _with("scale_0", 4.0),
        r"\.scale_0 is 4\.0, and was 2\.0",
    ),
    "an attribute that was missing": (
        Scales(),
        lambda held: getattr(held, "late", 1.0),
        _with("late", 4.0),
        r"\.late is 4\.0, and was missing",
    ),
    "UserDict": (
        collections.UserDict(rate=2.0),
        lambda held: held["rate"],
        _with_item("rate", 4.0),
        r"\.data\['rate'\] is 4\.0, and was 2\.0",
    ),
    "ChainMap": (
        collections.ChainMap({}, {"rate": 2.0}),
        lambda held: held["rate"],
        _with_item("rate", 4.0),
        r"\.maps\[0\]\['rate'\] is 4\.0, and was missing",
    ),
    "a scheduler": (
        _scheduler(),
        lambda held: held.get_last_lr()[0],
        _next_rate,
        r"\._last_lr\[0\] is 0\.0005, and was 0\.001",
    ),
    "an event": (
        threading.Event(),
        lambda held: 2.0 if held.is_set() else 1.0,
        threading.Event.set,
        r"\._flag is True, and was False",
    ),
    "a number that processes share": (
        multiprocessing.Value("d", 2.0),
        lambda held: held.value,
        _with("value", 4.0),
        r"\._obj is c_double\(4\.0\), and was c_double\(2\.0\)",
    ),
    "an array that processes share": (
        multiprocessing.Array("d", [2.0, 3.0]),
        lambda held: held[0],
        _with_item(0, 4.0),
        r"\._obj is \[4\.0, 3\.0\], and was \[2\.0, 3\.0\]",
    ),
    "a structure of C": (
        Pair(2.0, 3.0),
        lambda held: held.low,
        _with("high", 4.0),
        "is b.* when the step was captured",
    ),
    "a long list": (
        [2.0] * 5000,
        lambda held: held[4000],
        _with_item(4000, 4.0),
        r"\[4000\] is 4\.0, and was 2\.0",
    ),
    "a large dictionary": (
        dict.fromkeys(range(5000), 2.0),
        lambda held: held[4000],
        _with_item(4000, 4.0),
        r"\[4000\] is 4\.0, and was 2\.0",
    ),
    "a date": (
        types.SimpleNamespace(at=datetime.date(2026, 1, 1)),
        lambda held: held.at.day,
        _with("at", datetime.date(2026, 1, 2)),
        r"\.at is .*2026, 1, 2\), and was .*2026, 1, 1\)",
    ),
    "a path": (
        types.SimpleNamespace(at=pathlib.PurePosixPath("a")),
        lambda held: len(str(held.at)),
        _with("at", pathlib.PurePosixPath("ab")),
        r"\.at is PurePosixPath\('ab'\), and was PurePosixPath\('a'\)",
    ),
    "an identifier": (
        types.SimpleNamespace(at=uuid.UUID(int=2)),
        lambda held: held.at.int,
        _with("at", uuid.UUID(int=4)),
        r"\.at is UUID.*4'\), and was UUID.*2'\)",
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_step_reads_without_naming_it_is_compared(name: str) -> None:
    held, read, change, message = HELD[name]
    bound = trace_step(lambda x: x * read(held))(torch.ones(2)).bind()
    assert torch.equal(bound(torch.ones(2)), torch.full((2,), float(read(held))))
    change(held)
    with pytest.raises(StateMismatchError, match=message):
        bound(torch.ones(2))


def test_all_fields_count_that_asdict_reads() -> None:
    progress = Progress()
    bound = trace_step(lambda x: x * dataclasses.asdict(progress)["factor"])(torch.ones(2)).bind()
    progress.num_steps = 1
    with pytest.raises(StateMismatchError, match="num_steps is 1, and was 0"):
        bound(torch.ones(2))


def test_attributes_of_the_same_name_may_change_in_objects_of_which_they_were_not_read() -> None:
    one, other = Scales(), Scales()

    def step(x: Tensor) -> Any:
        return x * one.scale_0 * other.scale_1

    bound = trace_step(step)(torch.ones(2)).bind()
    one.scale_1 = other.scale_0 = 5.0
    assert torch.equal(bound(torch.ones(2)), torch.full((2,), 6.0))
    one.scale_0 = 5.0
    with pytest.raises(StateMismatchError, match=r"one .*\.scale_0 is 5\.0, and was 2\.0"):
        bound(torch.ones(2))


class WithOwnLookup:
    def __init__(self) -> None:
        self.factor = 2.0

    def __getattribute__(self, name: str) -> Any:
        return 2.0 if name == "constant" else object.__getattribute__(self, name)


def test_classes_have_their_own_lookup_again_after_a_capture_and_after_its_failure() -> None:
    held, scales = WithOwnLookup(), Scales()
    own = vars(WithOwnLookup)["__getattribute__"]

    def step(x: Tensor, fail: bool) -> Any:
        if fail:
            raise LookupError("in the step")
        return x * held.constant * held.factor * scales.scale_0

    assert torch.equal(
        trace_step(step)(torch.ones(2), False).bind()(torch.ones(2), False), torch.full((2,), 8.0)
    )
    with pytest.raises(LookupError, match="in the step"):
        trace_step(step)(torch.ones(2), True)
    assert vars(WithOwnLookup)["__getattribute__"] is own
    assert "__getattribute__" not in vars(Scales)


def test_number_that_processes_share_is_put_back_and_refused_where_the_step_changes_it() -> None:
    count: Any = multiprocessing.Value("d", 2.0)

    def step(x: Tensor) -> Any:
        count.value += 1
        return x * count.value

    with pytest.raises(CaptureError, match=r"was c_double\(2\.0\), and became c_double\(3\.0\)"):
        trace_step(step)(torch.ones(2))
    assert count.value == 2.0
