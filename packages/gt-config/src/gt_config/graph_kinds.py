"""The kinds of graph that passes run on: what a capture gives, and what it is cut into.

A pass says in its declaration on which of them it runs, and the recipe of a graph follows from that
(``gt_passes.contract``). The names stand here, beside those of the pipeline's actions, because
whoever captures, cuts or judges options means the same by them.
"""

from __future__ import annotations

from typing import Literal, get_args

from gt_config.node_keys import PipelineAction
from gt_config.topology import MeshAxis as MeshAxis

GraphKind = Literal[
    "STEP", "MICROBATCH", "STAGE", PipelineAction, "JOINT_FORWARD", "JOINT_BACKWARD"
]
"""STEP: forward, loss and backward of a whole model.
MICROBATCH: the same of one of several microbatches that share what the first gathers of parameters,
and whose gradients the last reduces (accumulation reduce_once).
STAGE: forward and backward of a pipeline stage, before they are cut into actions.
A pipeline action: the graph that runs it.
JOINT_FORWARD, JOINT_BACKWARD: the two parts of a joint graph, in mode aot_joint."""

PIPELINE_ACTIONS: tuple[PipelineAction, ...] = get_args(PipelineAction)

GRAPH_KINDS: tuple[GraphKind, ...] = get_args(GraphKind)

EVERY_GRAPH: frozenset[GraphKind] = frozenset(GRAPH_KINDS)

STEP_GRAPHS: frozenset[GraphKind] = frozenset({"STEP", "MICROBATCH"})
"""Those with forward, loss and backward of a whole model."""

JOINT_GRAPHS: frozenset[GraphKind] = frozenset({"JOINT_FORWARD", "JOINT_BACKWARD"})

COMPUTING_ACTIONS: frozenset[GraphKind] = frozenset(PIPELINE_ACTIONS) - {"UNSHARD", "REDUCE_GRAD"}
"""Actions of a pipeline that compute; the others gather parameters and reduce gradients."""

SHARD_AXES: frozenset[MeshAxis] = frozenset({"dp_shard", "cp"})
"""Axes over which FSDP shards parameters."""

DATA_PARALLEL_AXES: frozenset[MeshAxis] = SHARD_AXES | {"dp_replicate"}
"""Axes over which gradients are reduced."""
