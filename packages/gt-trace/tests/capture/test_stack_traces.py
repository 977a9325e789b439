"""Stack traces of a capture are those that ``make_fx`` writes, and cost less."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor, nn

from gt_trace import trace_step
from gt_trace.capture import trace
from gt_trace.capture.trace import held_garbage_collection


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner(x)
            x = x.relu()
        return x


def stack_traces() -> list[str | None]:
    model = Twice()

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    captured = trace_step(step, module=model)(torch.ones(2, 2))
    return [node.stack_trace for node in captured.graph_module.graph.nodes]


def test_texts_are_those_of_make_fx(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = stack_traces()
    monkeypatch.setattr(trace, "memoised_stack_traces", contextlib.nullcontext)
    theirs = stack_traces()
    assert [text for text, told in zip(ours, theirs, strict=True) if told] == list(
        filter(None, theirs)
    )
    assert any("x = x.relu()" in (text or "") for text in ours)
    # Outside of every forward make_fx has none.
    others = {text for text, told in zip(ours, theirs, strict=True) if text and not told}
    assert [each.splitlines()[-1].strip() for each in others] == [
        "return torch.autograd.grad(model(x).sum(), list(model.parameters()))"
    ]


def test_collector_runs_again_also_after_an_error() -> None:
    def fail() -> None:
        with held_garbage_collection():
            assert not gc.isenabled()
            raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with held_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
