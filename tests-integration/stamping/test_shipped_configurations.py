"""Every shipped configuration that is deep enough is stamped at its published sizes, on its mesh.

A capture needs no weights and no ranks, but time: all are slow. What made DeepSeek-V3 be traced in
full at its sizes and not at those of the debug model is also one of the cells of
``test_stamped_capture.py`` in CI: more than two ranks that experts are spread over.
"""

from __future__ import annotations

import importlib
import time

import pytest

from gt_config import CaptureLayers
from gt_trace import TracedStep
from gt_trace.stamping import StampReport, step_differences
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.models.catalog import CATALOG, CatalogEntry
from gt_trainer.steps.captured_step import trace_training_step
from gt_trainer.steps.program import TracingOptions

NUM_TRACED = {
    "llama3_8b": (4, 32),
    "llama3_70b": (4, 80),
    "llama3_405b": (4, 126),
    "qwen3_14b": (4, 40),
    "deepseek_v3_16b": (5, 27),
    "deepseek_v3_16b_sdpa": (5, 27),
    "deepseek_v3_671b": (7, 61),
}
"""Layers that are traced, and all: of DeepSeek-V3 the first ones are dense, and traced beside the
others. Debug models and stages of pipelines have fewer layers than ``auto`` stamps."""

ENTRIES = {entry.config: entry for module in CATALOG.values() for entry in module.values()}


def captured(
    entry: CatalogEntry, *ways: CaptureLayers
) -> list[tuple[TracedStep, StampReport | None, float]]:
    """The step, the report and the processor seconds of a capture in each way."""
    config = getattr(importlib.import_module(f"gt_trainer.models.{entry.module}"), entry.config)()
    made: list[tuple[TracedStep, StampReport | None, float]] = []
    with fake_step(config, entry.world_size) as step:
        for capture_layers in ways:
            begin = time.process_time()
            traced, report = trace_training_step(
                step.model,
                step.loss_fn,
                *step.inputs,
                options=TracingOptions(capture_layers=capture_layers, meta_device=step.meta_device),
            )
            assert report is None or isinstance(report, StampReport)
            made.append((traced, report, time.process_time() - begin))
    return made


def test_every_configuration_of_enough_layers_is_held_to_a_stamped_capture() -> None:
    deep = {
        name
        for name, entry in ENTRIES.items()
        if not name.endswith(("_debugmodel", "_pp")) and entry.world_size > 1
    }
    assert deep == NUM_TRACED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_TRACED)
def test_shipped_configuration_is_stamped(name: str) -> None:
    ((_, report, _),) = captured(ENTRIES[name], "auto")
    assert report is not None
    assert report.refusal is None
    assert (report.num_layers_traced, report.num_layers) == NUM_TRACED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_16b", "deepseek_v3_671b"])
def test_deepseek_at_its_sizes_is_the_full_capture(name: str) -> None:
    (stamped, report, seconds), (full, _, full_seconds) = captured(ENTRIES[name], "stamped", "full")
    assert report is not None
    assert report.refusal is None
    assert step_differences(stamped, full) == []
    assert seconds < full_seconds
