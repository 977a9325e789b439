"""The graph runtime of torchtitan's graph_trainer over stages that compute nothing.

It runs on PyTorch's runtime and has graphs behind a protocol, for which these stand. torchtitan
0.3.0 keeps outputs in ``stage.fwd_cache``, which PyTorch 2.15 has no more: there its steps fail.
Given back here, it serves the peer's own handlers. Sends look for outputs elsewhere, so pipelines
of more than one rank stay out of reach.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torchtitan.experiments.graph_trainer.graph_pp.runner import register_graph_pp_schedule
from torchtitan.experiments.graph_trainer.graph_pp.stage import GraphPipelineStage

from gt_pipeline.schedules import Schedule, build_pipeline_schedule
from pipeline_runtime.torch_stages import Scale

__all__ = ["PEER_NAME", "peer_runtime"]

PEER_NAME = "torchtitan graph_trainer"


class _NoGraphs:
    """Stands for the graphs of one stage, or of an overlapped pair."""

    supports_backward_input_weight_split = True
    num_unsharded_param_grad_values = 1

    def __init__(self, shape: tuple[int, ...], is_last: bool) -> None:
        self._output = torch.zeros(()) if is_last else torch.zeros(shape)
        self._input_gradients: list[Tensor] = [torch.zeros(shape)]

    def unshard_params(self, values: list[Any], **options: Any) -> list[Any]:
        return values

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._output, ()

    def full_backward(self, *args: Any, **options: Any) -> Any:
        return self._input_gradients, [None]

    def backward_input(self, *args: Any, **options: Any) -> Any:
        return self._input_gradients, ()

    def backward_weight(self, saved: Any) -> list[Any]:
        return [None]

    def reduce_grads(self, gradients: list[Any], **options: Any) -> list[Any]:
        return []

    def param_grads_for_accumulation(self, gradients: list[Any]) -> list[Any]:
        return gradients


class _NoOverlap:
    def __init__(self, forward: _NoGraphs, backward: _NoGraphs) -> None:
        self._forward, self._backward = forward, backward

    def forward_backward(self, **options: Any) -> Any:
        return (*self._backward.full_backward(), *self._forward.forward())


class _Provider:
    def __init__(self, pairs: dict[tuple[int, int], _NoOverlap]) -> None:
        self._pairs = pairs

    def prepare_graphs(self, *args: Any, **options: Any) -> dict[tuple[int, int], _NoOverlap]:
        return self._pairs


def peer_runtime(schedule: Schedule, rank: int, shape: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """The peer's runtime, and its stages of a rank."""
    logging.getLogger().setLevel(logging.WARNING)
    stages = []
    graphs = {}
    for index in schedule.stages_of_rank(rank):
        stage = GraphPipelineStage(
            Scale(),
            stage_index=index,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
        )
        stage.fwd_cache = {}
        graphs[index] = _NoGraphs(shape, stage.is_last)
        stage.set_graphs(graphs[index])
        stages.append(stage)
    runtime = build_pipeline_schedule(
        stages,
        num_microbatches=schedule.num_microbatches,
        name=schedule.name,
        loss_fn=lambda output, target: output.sum(),
        backward_requires_autograd=True,
    )
    pairs = {
        (first, second): _NoOverlap(graphs[first], graphs[second])
        for first in graphs
        for second in graphs
    }
    return register_graph_pp_schedule(runtime, graph_provider=_Provider(pairs)), stages
