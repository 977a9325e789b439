"""The passes of torchtitan's graph_trainer, on a graph that we captured.

Its default list for a whole step without recomputation: dead code, canonical views, equal unshard
chains, and transformer-block bucketing with reordering. They know modules by an annotation of their
own, which is written from ours; nothing else is changed about graph or passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.fx import GraphModule
from torchtitan.experiments.graph_trainer.common_utils import (
    get_default_transformer_block_buckets,
)
from torchtitan.experiments.graph_trainer.fsdp_passes import (
    deduplicate_fsdp_unshard_chains_pass,
    get_fsdp_param_module_order,
    joint_transformer_block_bucketing_reordering_pass,
)
from torchtitan.experiments.graph_trainer.remove_noop_passes import (
    canonicalize_graph_pass,
    eliminate_dead_code_pass,
)

from graph_passes.captured import CapturedModel
from gt_trace import module_fqn

__all__ = ["PEER_NAME", "annotate_for_peer", "run_peer_passes"]

PEER_NAME = "torchtitan graph_trainer"


def annotate_for_peer(graph_module: GraphModule) -> None:
    """Write the peer's module annotation on every node, from ours."""
    for node in graph_module.graph.nodes:
        fqn = module_fqn(node)
        if fqn:
            node.meta["custom"] = {**node.meta.get("custom", {}), "module_fqn": fqn}


def run_peer_passes(graph_module: GraphModule, model: CapturedModel) -> GraphModule:
    """Run the peer's passes, as its ``apply_graph_passes`` does."""
    logging.getLogger().setLevel(logging.WARNING)
    example_inputs = model.traced.example_inputs
    names = [entry.name for entry in model.traced.inputs[: model.traced.num_static_inputs]]
    plans = get_default_transformer_block_buckets(model.num_layers, chunked_loss_enabled=True)

    def bucketing(gm: GraphModule, inputs: tuple[object, ...]) -> GraphModule:
        return joint_transformer_block_bucketing_reordering_pass(
            gm,
            inputs,
            module_bucket_plans=plans,
            fsdp_param_module_order=get_fsdp_param_module_order(names),
        )

    passes: list[Callable[..., GraphModule]] = [
        eliminate_dead_code_pass,
        canonicalize_graph_pass,
        deduplicate_fsdp_unshard_chains_pass,
        bucketing,
    ]
    for graph_pass in passes:
        graph_module = graph_pass(graph_module, example_inputs)
    return graph_module
