"""A stamped capture of a pipeline's stage is the full one, at either end of the model.

Each stage is captured in both ways and compared in everything that a pass or a run can see
(``step_differences``); then it is cut into its actions, which are verified. One cell of each model
stands for all in CI.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
from stamping.cases import MODELS, with_layers

from gt_config import CaptureLayers
from gt_trace.stamping import StampReport
from gt_trainer.dry_run.captured_dry_step import CapturedDryStep, capture_divided
from gt_trainer.dry_run.fake_pipeline import planned_pipeline
from gt_trainer.dry_run.fake_step import fake_ranks, meta_model

MESHES = {
    "PP": (2, {}),
    "PP x FSDP": (4, {}),
    "PP x TP": (4, {"tensor_parallel_degree": 2}),
    "PP x FSDP x TP": (8, {"tensor_parallel_degree": 2}),
    "PP x FSDP x EP": (8, {"expert_parallel_degree": 2}),
    "PP x FSDP x TP x EP": (8, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
}
QUICK = (("llama3", "PP x FSDP x TP"),)


def captured(
    model: str, mesh: str, num_layers: int, capture_layers: CaptureLayers
) -> CapturedDryStep:
    """Two stages of half of the layers each."""
    module, name = MODELS[model]
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    with_layers(config, num_layers)
    world_size, degrees = MESHES[mesh]
    config.training.local_batch_size = 4
    config.parallelism = replace(config.parallelism, pipeline_parallel_degree=2, **degrees)
    config.compile = replace(config.compile, capture_layers=capture_layers)
    with fake_ranks(world_size):
        return capture_divided(config, meta_model(config, world_size), planned_pipeline(config))


def cells() -> list[object]:
    return [
        pytest.param(
            model,
            mesh,
            marks=[] if (model, mesh) in QUICK else [pytest.mark.slow],
            id=f"{model}, {mesh}",
        )
        for model in ("llama3", "deepseek_v3")
        for mesh in MESHES
        if model == "deepseek_v3" or "EP" not in mesh
    ]


@pytest.mark.parametrize(("model", "mesh"), cells())
def test_a_stamped_stage_is_the_full_one(model: str, mesh: str) -> None:
    pipeline = captured(model, mesh, 12, "compared")
    first, last = (each.stamping for each in pipeline.reports)
    for stamping in (first, last):
        assert isinstance(stamping, StampReport)
        assert stamping.refusal is None
        assert stamping.compared
        assert stamping.num_layers == 6
    assert last is not None
    assert last.num_layers_traced == 4
    layers = {
        name.split(".")[1]
        for name in pipeline.stages[1].capture.gradient_layouts
        if name.startswith("layers.")
    }
    assert layers == {str(index) for index in range(6, 12)}


@pytest.mark.parametrize(
    ("num_layers", "num_traced"), [(24, (4, 4)), pytest.param(22, (11, 11), marks=pytest.mark.slow)]
)
def test_layers_of_a_stage_are_stamped_where_it_pays(
    num_layers: int, num_traced: tuple[int, int]
) -> None:
    pipeline = captured("llama3", "PP", num_layers, "auto")
    found = [each.stamping and each.stamping.num_layers_traced for each in pipeline.reports]
    assert tuple(found) == num_traced
    lines = [str(report) for report in pipeline.reports]
    told = "(4 of 12 layers traced, the others stamped)"
    assert all((told in line) == (num_layers == 24) for line in lines)
