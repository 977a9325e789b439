"""The fuzzer of captures: a slice of its campaign, and proof that it finds faults."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
import torch

from fuzz import capture_case
from fuzz.capture_case import CaptureCase, draw_capture_case, judge_capture
from fuzz.captures import draw_capture_cases, smallest
from fuzz.step_statements import STATEMENTS, Statement
from gt_trace.errors import CaptureError


def case_of(*kinds: str, **settings: Any) -> CaptureCase:
    statements = tuple(Statement(kind=kind, first=-1, second=0) for kind in kinds)
    defaults: dict[str, Any] = {
        "seed": 5,
        "layers": (statements,),
        "captured_layout": "contiguous",
        "layouts": ("contiguous", "contiguous"),
        "policy": "as captured",
    }
    return CaptureCase(**(defaults | settings))


def test_cases_survive_json() -> None:
    for case in islice(draw_capture_cases(3), 50):
        assert CaptureCase.from_json(case.to_json()) == case


def test_a_seed_draws_the_same_cases_again_and_every_kind_of_statement() -> None:
    assert list(islice(draw_capture_cases(3), 50)) == list(islice(draw_capture_cases(3), 50))
    drawn = [draw_capture_case(random.Random(seed)) for seed in range(400)]
    kinds = {each.kind for case in drawn for layer in case.layers for each in layer}
    assert kinds == STATEMENTS.keys()


def planted(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change`` make something else of each captured step."""
    trace_step = capture_case.trace_step

    def with_fault(step: Any, *, module: Any) -> Any:
        return lambda x: change(trace_step(step, module=module)(x), module)

    monkeypatch.setattr(capture_case, "trace_step", with_fault)


def test_finds_a_graph_that_computes_something_else_and_makes_the_case_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop_more(traced: Any, module: Any) -> Any:
        for node in traced.graph_module.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.target = torch.ops.aten.tanh.default
                node.kwargs = {}
        traced.graph_module.recompile()
        return traced

    planted(monkeypatch, drop_more)
    case = case_of("linear", "gelu", "softmax", policy="save_all", num_calls_before=1)
    verdict = judge_capture(case)
    assert verdict.outcome == "different"
    assert verdict.details.startswith("in call 1 (contiguous): loss, output, gradient of")
    assert smallest(case, verdict)[0] == case_of("gelu")


def test_finds_an_error_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(traced: Any, module: Any) -> Any:
        raise LookupError("planted")

    planted(monkeypatch, fail)
    assert judge_capture(case_of("linear")).details == "LookupError: planted"


def test_finds_a_refusal_that_leaves_the_model_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(traced: Any, module: Any) -> Any:
        with torch.no_grad():
            module.head.weight.zero_()
        raise CaptureError("planted")

    planted(monkeypatch, spoil)
    assert judge_capture(case_of("linear")).outcome == "model broken"


def test_finds_random_numbers_that_a_capture_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(traced: Any, module: Any) -> Any:
        torch.rand(1)
        return traced

    planted(monkeypatch, draw)
    assert judge_capture(case_of("linear")).details == "after the capture: torch's random state"
