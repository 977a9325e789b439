"""A random step, run eagerly and as a captured graph, call by call.

Both have a model of their own, equal at the start. After each call, everything that a user can
read must be equal in every bit: outputs, gradients, parameters, buffers, the inputs that the step
may have written, and the states of the random number generators. Or the captured step is refused
with an error of gt-trace, and then the model is as it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy
import torch
from torch import nn

from fuzz.step_statements import DIM, STATEMENTS, Scope, Statement, run_statement
from gt_config import CompileConfig
from gt_passes import optimize
from gt_trace import trace_step
from gt_trace.errors import GtTraceError

__all__ = ["LAYOUTS", "CaptureCase", "CaptureVerdict", "draw_capture_case", "judge_capture"]

Layout = Literal["contiguous", "transposed", "every_second", "offset", "expanded"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "every_second", "offset", "expanded")

Policy = Literal["as captured", "save_all", "selective", "full_recompute", "offload"]
POLICIES: tuple[Policy, ...] = (
    "as captured",
    "save_all",
    "selective",
    "full_recompute",
    "offload",
)

_SHAPE = (3, 5, DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCase:
    """Everything that decides what runs."""

    seed: int
    layers: tuple[tuple[Statement, ...], ...]
    """Statements of each layer."""

    captured_layout: Layout
    """Layout of the batch with which the step is captured."""

    layouts: tuple[Layout, ...]
    """Layouts of the batches of the calls."""

    policy: Policy
    """Passes between capture and replay."""

    num_calls_before: int = 0
    """Eager calls of both models before the capture."""

    ambient_autocast: bool = False

    def to_json(self) -> str:
        """Return the case as JSON text, the same for equal cases."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the case that ``to_json`` wrote."""
        record = json.loads(text)
        layers = tuple(tuple(Statement(**each) for each in layer) for layer in record["layers"])
        return cls(**{**record, "layers": layers, "layouts": tuple(record["layouts"])})

    def describe(self) -> str:
        """Return the case in one line."""
        layers = " | ".join(" ".join(each.kind for each in layer) for layer in self.layers)
        flags = f", {self.num_calls_before} calls before" * bool(self.num_calls_before)
        flags += ", in autocast" * self.ambient_autocast
        return (
            f"seed {self.seed}, {self.captured_layout} then {', '.join(self.layouts)}, "
            f"{self.policy}{flags}: {layers}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureVerdict:
    """Result of a case."""

    outcome: Literal["equal", "refused", "no case", "different", "raw error", "model broken"]
    details: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the promise is broken: the same bits, or a refusal that changes nothing."""
        return self.outcome in ("different", "raw error", "model broken")


def draw_capture_case(source: random.Random) -> CaptureCase:
    """Draw a case."""
    kinds = list(STATEMENTS)

    def layer() -> tuple[Statement, ...]:
        return tuple(
            Statement(
                kind=source.choice(kinds) if source.random() < 0.5 else source.choice(kinds[:34]),
                first=source.choice([-1, -1, -1, source.randrange(8)]),
                second=source.randrange(8),
            )
            for _ in range(source.randint(1, 3))
        )

    layouts: tuple[Layout, ...] = ("contiguous",)
    varied = source.random() < 0.4
    return CaptureCase(
        seed=source.randrange(10_000),
        layers=tuple(layer() for _ in range(source.randint(1, 2))),
        captured_layout=source.choice(LAYOUTS) if varied else "contiguous",
        layouts=tuple(source.choice(LAYOUTS) for _ in range(2)) if varied else layouts * 2,
        policy=source.choice(POLICIES),
        num_calls_before=source.choice([0, 0, 0, 1]),
        ambient_autocast=source.random() < 0.1,
    )


class _Layer(nn.Module):
    def __init__(self, statements: tuple[Statement, ...]) -> None:
        super().__init__()
        self.statements = statements
        self.scopes = nn.ModuleList(Scope() for _ in statements)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = [x]
        for statement, scope in zip(self.statements, self.scopes, strict=True):
            result = run_statement(statement, scope, pool)
            if result is not None and result.shape[-1] == DIM:
                pool.append(result.float())
        return pool[-1]


class _Model(nn.Module):
    def __init__(self, case: CaptureCase) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(layer) for layer in case.layers)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def _batch(case: CaptureCase, number: int, layout: Layout) -> torch.Tensor:
    """Return the same values for the same number, in memory of the given layout."""
    generator = torch.Generator().manual_seed(case.seed * 100 + number)
    values = torch.randn(_SHAPE, generator=generator)
    if layout == "transposed":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every_second":
        wide = torch.zeros(_SHAPE[0], _SHAPE[1] * 2, DIM)
        wide[:, ::2] = values
        return wide[:, ::2]
    if layout == "offset":
        return torch.cat([torch.zeros(DIM), values.flatten()])[DIM:].view(_SHAPE)
    if layout == "expanded":
        return values[:1].expand(_SHAPE)
    return values


class _Run:
    """One of the two models, with the random state in which its next call runs."""

    def __init__(self, case: CaptureCase) -> None:
        torch.manual_seed(case.seed)
        self.model = _Model(case)
        self.parameters = list(self.model.parameters())
        self.case = case
        self._states = self._seeded(case.seed)

    def _seeded(self, seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        return self._now()

    def _now(self) -> tuple[Any, Any, Any]:
        return torch.get_rng_state(), numpy.random.get_state(), random.getstate()

    def __enter__(self) -> None:
        torch.set_rng_state(self._states[0])
        numpy.random.set_state(self._states[1])
        random.setstate(self._states[2])

    def __exit__(self, *exception: object) -> None:
        self._states = self._now()

    def step(self, x: torch.Tensor) -> tuple[Any, ...]:
        output = self.model(x)
        loss = output.float().square().mean()
        return loss, output, torch.autograd.grad(loss, self.parameters, allow_unused=True)

    def autocast(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.case.ambient_autocast)

    def readable(self, x: torch.Tensor, results: Any) -> dict[str, Any]:
        """Return everything that a user can compare after a call."""
        loss, output, gradients = results
        torch_state, numpy_state, python_state = self._states
        named = dict(zip(dict(self.model.named_parameters()), gradients, strict=True))
        values = {
            "loss": loss,
            "output": output,
            **{f"gradient of {name}": value for name, value in named.items()},
            **{f"state {name}": value for name, value in self.model.state_dict().items()},
            "input": x,
            "torch's random state": torch_state,
            "NumPy's random state": [*numpy_state[1].tolist(), numpy_state[2]],
            "Python's random state": python_state,
            **{
                f"generator {number}": scope.generator.get_state()
                for number, scope in enumerate(self._scopes())
            },
        }
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    def _scopes(self) -> Iterator[Scope]:
        return (each for each in self.model.modules() if isinstance(each, Scope))


def judge_capture(case: CaptureCase) -> CaptureVerdict:
    """Run a case both ways, and compare."""
    layouts = (*[case.captured_layout] * case.num_calls_before, *case.layouts, "contiguous")
    eager = _Run(case)
    try:
        expected = [_called(eager, number, layout) for number, layout in enumerate(layouts)]
    except Exception as error:  # noqa: BLE001  # a step that eager PyTorch refuses is no case
        return CaptureVerdict(outcome="no case", details=repr(error))
    captured = _Run(case)
    for number in range(case.num_calls_before):
        _called(captured, number, layouts[number])
    number = case.num_calls_before
    refusal = ""
    try:
        step, changes = _captured(captured)
        if changes:
            return CaptureVerdict(outcome="different", details=f"after the capture: {changes}")
        for layout in case.layouts:
            found = _called(captured, number, layout, step)
            if differences := _differences(expected[number], found):
                where = f"in call {number} ({layout}): {differences}"
                return CaptureVerdict(outcome="different", details=where)
            number += 1
    except GtTraceError as error:
        refusal = str(error)
    except Exception as error:  # noqa: BLE001  # reported as what it is
        return CaptureVerdict(outcome="raw error", details=f"{type(error).__name__}: {error}")
    # The model itself goes on eagerly, from wherever the captured step left it.
    try:
        differences = _differences(expected[number], _called(captured, number, layouts[number]))
    except Exception as error:  # noqa: BLE001  # reported as what it is
        differences = repr(error)
    if differences:
        details = f"eager call {number} afterwards: {differences}; refused by {refusal or 'none'}"
        return CaptureVerdict(outcome="model broken", details=details)
    return CaptureVerdict(outcome="refused" if refusal else "equal", details=refusal)


def _called(
    run: _Run, number: int, layout: Layout, step: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Make one call, eagerly by default, and return what can be read after it."""
    x = _batch(run.case, number, layout)
    with run, run.autocast():
        results = (step or run.step)(x)
    return run.readable(x, results)


def _captured(run: _Run) -> tuple[Callable[..., Any], str]:
    """Return the captured step of a model, and what the capture changed that a user can read."""
    case = run.case
    example = _batch(case, 99, case.captured_layout)
    unused = None, None, [None] * len(run.parameters)
    before = run.readable(example, unused)
    with run, run.autocast():
        traced = trace_step(run.step, module=run.model)(example)
    changes = _differences(before, run.readable(example, unused))
    if case.policy != "as captured":
        optimize(traced, CompileConfig(memory_policy=case.policy))
    return traced.bind(run.model), changes


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the names of all values that differ in any bit."""
    return ", ".join(name for name, value in expected.items() if not _is_same(value, found[name]))


def _is_same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return bool(expected == found)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    return expected.flatten().view(torch.uint8).equal(found.flatten().view(torch.uint8))
