"""Steps that are stored and loaded in tests: what each holds that a document must be able to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from test_flex_attention import Model, batch_of, mask_for
from test_flex_attention import step_of as step_of_attention
from torch import nn
from trace_models import TiedModel, batch, step_of

from gt_trace import TracedStep, flex_attention_on_cpu, trace_step
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.step_document import STEP_FORM


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A captured step, and how to run it."""

    step: TracedStep
    module: nn.Module
    inputs: tuple[Any, ...]


def tied() -> StepCase:
    """Tied weights, a buffer that counts up, annotations."""
    torch.manual_seed(0)
    model = TiedModel()
    inputs = batch(1)
    return StepCase(
        step=trace_step(step_of(model), module=model)(*inputs), module=model, inputs=inputs
    )


def attention() -> StepCase:
    """FlexAttention: subgraphs, and a mask whose function is part of the arguments' structure."""
    torch.manual_seed(0)
    model = Model(2)
    x, documents = batch_of(1)
    inputs = (x, mask_for(documents))
    with flex_attention_on_cpu():
        step = trace_step(step_of_attention(model), module=model)(*inputs)
    return StepCase(step=step, module=model, inputs=inputs)


class _Chosen(nn.Module):
    """Takes the rows that are above zero: how many, only a run tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        torch._check(rows.shape[0] <= x.shape[0])
        return x.index_select(0, rows) @ self.weight


def run_time_sizes() -> StepCase:
    """Sizes that only a run tells."""
    torch.manual_seed(0)
    model = _Chosen()
    inputs = (torch.randn(6, 4),)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return StepCase(step=trace_step(step, module=model)(*inputs), module=model, inputs=inputs)


def constants() -> StepCase:
    """Constant tensors, numbers that are not finite, dropout, and outputs in a tree."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    table = torch.arange(4, dtype=torch.bfloat16)
    inputs = (torch.randn(3, 4), {"scale": 2.0, "other": None})

    def step(x: torch.Tensor, options: dict[str, Any]) -> Any:
        y = model(x).masked_fill(x > 1, -torch.inf).clamp(min=-10) * options["scale"]
        loss = (y * table).sum()
        return {"loss": loss, "gradients": torch.autograd.grad(loss, list(model.parameters()))}

    return StepCase(
        step=trace_step(step, module=model, constants="allow")(*inputs),
        module=model,
        inputs=inputs,
    )


CASES: dict[str, Callable[[], StepCase]] = {
    "tied": tied,
    "attention": attention,
    "run_time_sizes": run_time_sizes,
    "constants": constants,
}


def stored_and_loaded(step: TracedStep, axes: MeshAxes | None = None) -> TracedStep:
    """A step through JSON and back."""
    axes = axes or MeshAxes.of()
    encoded = STEP_FORM.encode(step, axes)
    document = json.loads(json.dumps(encoded.document))
    return STEP_FORM.decode(document, axes, blob=encoded.blobs.__getitem__)


def run(case: StepCase, step: TracedStep) -> Any:
    """The outputs of one run of ``step``, with the random numbers of a fixed seed."""
    torch.manual_seed(7)
    with flex_attention_on_cpu():
        return step.bind(case.module)(*case.inputs)
