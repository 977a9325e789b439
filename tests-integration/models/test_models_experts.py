"""What the products of mixtures of experts compute in, seen in captured steps of their models.

One rank of a world that does not exist, on the meta device: no value is computed.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from stamping.cases import MODELS, with_layers
from torch import fx
from torchtitan.models.common.moe import GroupedExperts

from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.steps.captured_step import trace_training_step
from gt_trainer.steps.program import TracingOptions
from gt_trainer.trainer import GraphTrainer

DEBUG_MIXTURES = ("qwen3-MoE", "deepseek_v3")
NUM_PRODUCTS = 3 + 2 * 3
"""Of a layer's experts, forward and backward."""


def config_of(module: str, config: str) -> GraphTrainer.Config:
    made: GraphTrainer.Config = getattr(
        importlib.import_module(f"gt_trainer.models.{module}"), config
    )()
    made.training.local_batch_size, made.training.seq_len = 1, 64
    return with_layers(made, 2)


def captured(config: GraphTrainer.Config, world_size: int) -> fx.Graph:
    with fake_step(config, world_size) as step:
        traced, _ = trace_training_step(
            step.model,
            step.loss_fn,
            *step.inputs,
            options=TracingOptions(capture_layers="full", meta_device=step.meta_device),
        )
    return traced.graph_module.graph


def product_dtypes(graph: fx.Graph) -> list[torch.dtype]:
    return [
        node.meta["val"].dtype
        for node in graph.nodes
        if node.target is torch.ops.aten._grouped_mm.default
    ]


@pytest.mark.parametrize("model", DEBUG_MIXTURES)
@pytest.mark.parametrize("expert_parallel_degree", [1, 2])
def test_a_debug_mixture_computes_nothing_in_bfloat16_on_cpu(
    model: str, expert_parallel_degree: int
) -> None:
    config = config_of(*MODELS[model])
    config.parallelism.expert_parallel_degree = expert_parallel_degree
    graph = captured(config, expert_parallel_degree)
    assert set(product_dtypes(graph)) == {torch.float32}
    values = [node.meta.get("val") for node in graph.nodes]
    assert not [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16]
    num_mixtures = {"qwen3-MoE": 2, "deepseek_v3": 1}[model]
    assert len(product_dtypes(graph)) == NUM_PRODUCTS * num_mixtures


def test_a_debug_mixture_computes_in_bfloat16_where_the_run_does() -> None:
    config = config_of(*MODELS["qwen3-MoE"])
    config.training.mixed_precision_param = "bfloat16"
    assert set(product_dtypes(captured(config, 1))) == {torch.bfloat16}


def test_a_published_mixture_has_torchtitans_experts_and_computes_in_bfloat16() -> None:
    config = config_of("deepseek_v3", "deepseek_v3_16b")
    assert config.model_spec is not None
    model = config.model_spec.model
    found = [experts for _, experts, _, _ in model.traverse(GroupedExperts.Config)]
    assert {type(experts) for experts in found} == {GroupedExperts.Config}
    products = product_dtypes(captured(config, 32))
    assert products == [torch.bfloat16] * NUM_PRODUCTS
