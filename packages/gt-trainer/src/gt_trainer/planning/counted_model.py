"""Counts what a decoder has, from the model itself on meta and its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_trainer.decoder.chunked_loss import GraphChunkedLoss
from gt_trainer.decoder.expert_layers import expert_layers
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.model_counts import LayerCounts, ModelCounts
from gt_trainer.preflight.preflight import model_numbers_of
from gt_trainer.trainer import GraphTrainer

_ATTENTION = "attention.wo.weight"
_LAST_PRODUCT = "w2"
"""Of feed-forwards and experts: nothing in the backward reads its result."""


def counted_model(config: GraphTrainer.Config) -> ModelCounts:
    """The counts of the model of ``config``.

    Raises:
        NoRecipeError: a layer has no attention as torchtitan's have.
        TypeError: it is no decoder of torchtitan's.
    """
    spec = config.model_spec
    if spec is None or not isinstance(spec.model, Decoder.Config):
        raise TypeError("a plan is made of torchtitan's decoders, and this configuration has none")
    # The whole model, whatever degrees were asked for: whether it can have them is asked later.
    alone = replace(
        config.parallelism,
        tensor_parallel_degree=1,
        context_parallel_degree=1,
        expert_parallel_degree=1,
        pipeline_parallel_degree=1,
    )
    spec.model.update_from_config(config=replace(config, parallelism=alone))
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        model: Any = spec.model.build()
    _, flops_per_token = spec.model.get_nparams_and_flops(model, config.training.seq_len)
    numbers = model_numbers_of(config)
    assert numbers is not None
    moes = expert_layers(spec.model)
    top_k = max((moe.router.top_k for moe in moes), default=0)
    layers = tuple(_layer(layer, numbers.num_experts, top_k) for layer in model.layers.values())
    in_layers = sum(each.dense_parameters + each.expert_parameters for each in layers)
    embedding = model.tok_embeddings.weight
    rest = sum(p.numel() for p in model.parameters()) - in_layers - embedding.numel()
    return ModelCounts(
        layers=layers,
        embedding_parameters=embedding.numel(),
        output_parameters=rest,
        output_products=model.lm_head.weight.numel(),
        loss_chunks=config.loss.num_chunks
        if isinstance(config.loss, GraphChunkedLoss.Config)
        else 1,
        dim=embedding.shape[1],
        seq_len=config.training.seq_len,
        products_dtype=config.training.mixed_precision_param,
        parameter_bytes=dtype.itemsize,
        flops_per_token=flops_per_token,
        max_tp=math.gcd(*numbers.heads.values()),
        num_experts=numbers.num_experts,
    )


def _layer(layer: nn.Module, num_experts: int | None, top_k: int) -> LayerCounts:
    shapes = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
    dense = [(name, shape) for name, shape in shapes if len(shape) == 2]
    experts = [(name, shape) for name, shape in shapes if len(shape) == 3]
    width = next((shape[1] for name, shape in dense if name == _ATTENTION), None)
    if width is None:
        names = ", ".join(name for name, _ in shapes)
        raise NoRecipeError(f"a layer has no {_ATTENTION}, of which plans are made; it has {names}")
    query_width, keys_values_width = _widths(dict(dense), width)
    chosen = top_k / num_experts if num_experts else 0.0

    def repeated(of: Sequence[tuple[str, torch.Size]]) -> int:
        return sum(shape.numel() for name, shape in of if _LAST_PRODUCT not in name)

    expert_outputs = float(top_k * sum(shape[1] for _, shape in experts))
    return LayerCounts(
        dense_parameters=sum(shape.numel() for _, shape in shapes if len(shape) < 3),
        expert_parameters=sum(shape.numel() for _, shape in experts),
        dense_products=sum(shape.numel() for _, shape in dense),
        expert_products=chosen * sum(shape.numel() for _, shape in experts),
        repeated_dense=repeated(dense),
        repeated_experts=chosen * repeated(experts),
        attention_width=width,
        query_width=query_width,
        keys_values_width=keys_values_width,
        outputs_width=sum(shape[0] for _, shape in dense) + expert_outputs,
        expert_outputs_width=expert_outputs,
        sent_copies=float(top_k) if experts else 0.0,
        expert_layers=1 if experts else 0,
    )


def _widths(dense: Mapping[str, torch.Size], values_width: int) -> tuple[int, int]:
    """Of queries, and of keys and values together.

    Latent attention has keys as wide as its queries, which are wider than its values.
    """
    rows = {name: shape[0] for name, shape in dense.items()}
    if "attention.wkv_b.weight" in rows:
        last = "attention.wq_b.weight" if "attention.wq_b.weight" in rows else "attention.wq.weight"
        return rows[last], rows[last] + values_width
    together = rows.get("attention.qkv_linear.wqkv.weight")
    if together is not None:
        return values_width, together - values_width
    return values_width, sum(
        rows[name] for name in rows if name.endswith((".wk.weight", ".wv.weight"))
    )
