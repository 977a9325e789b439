"""Which stages share a capture: what their layers' configurations say, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torchtitan.models.deepseek_v3 import model_registry as deepseek
from torchtitan.models.llama3 import model_registry as llama

from gt_pipeline.split import TORCHTITAN_NAMING, module_names_per_stage
from gt_trainer.dry_run.equal_stages import equal_stages


@dataclass(frozen=True)
class Layer:
    width: int = 8
    experts: dict[str, Any] = field(default_factory=dict)
    param_init: Any = None


def stages(layers: list[Layer], *names: str) -> tuple[int, ...]:
    return equal_stages([each.split() for each in names], layers)


def names_of(spec: Any, num_stages: int) -> Any:
    return module_names_per_stage(
        len(spec.model.layers), num_stages=num_stages, naming=TORCHTITAN_NAMING
    )


def test_the_first_and_the_last_are_like_no_other():
    layers = [Layer()] * 5
    assert stages(layers, *(f"layers.{index}" for index in range(5))) == (0, 1, 1, 1, 4)


def test_layers_that_are_configured_differently_differ():
    layers = [Layer(), Layer(), replace(Layer(), experts={"top_k": 2}), Layer(), Layer()]
    assert stages(layers, *(f"layers.{index}" for index in range(5))) == (0, 1, 2, 1, 4)


def test_other_modules_beside_the_same_layers_differ():
    layers = [Layer()] * 4
    found = stages(layers, "layers.0", "layers.1", "layers.2 norm", "layers.3")
    assert found == (0, 1, 2, 3)


def test_how_weights_are_drawn_does_not_count():
    layers = [replace(Layer(), param_init=torch.nn.init.normal_), Layer(), Layer(), Layer()]
    assert stages(layers, *(f"layers.{index}" for index in (1, 0, 2, 3))) == (0, 1, 1, 3)


@pytest.mark.parametrize("num_stages", [16, 32])
def test_a_dense_model_has_few_kinds_of_stages(num_stages: int):
    spec = llama("405B")
    assert len(set(equal_stages(names_of(spec, num_stages), spec.model.layers))) <= 4


def test_stages_of_experts_are_no_dense_stages():
    spec = deepseek("671B")
    found = equal_stages(names_of(spec, 32), spec.model.layers)
    dense = [i for i, layer in enumerate(spec.model.layers) if getattr(layer, "moe", None) is None]
    assert dense == [0, 1, 2]
    # Embedding and a dense layer; two dense ones; ones with experts; the last.
    assert len(set(found)) == 4
    assert set(found[2:-1]) == {2}
