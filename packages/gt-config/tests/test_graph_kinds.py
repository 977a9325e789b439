"""The kinds of graph are named once, and every pipeline action is one."""

from typing import get_args

from gt_config.graph_kinds import (
    COMPUTING_ACTIONS,
    EVERY_GRAPH,
    JOINT_GRAPHS,
    PIPELINE_ACTIONS,
    STEP_GRAPHS,
)
from gt_config.node_keys import PipelineAction


def test_every_action_of_a_pipeline_is_a_kind_of_graph():
    assert get_args(PipelineAction) == PIPELINE_ACTIONS
    assert {*STEP_GRAPHS, "STAGE", *PIPELINE_ACTIONS, *JOINT_GRAPHS} == EVERY_GRAPH
    assert {*PIPELINE_ACTIONS} - COMPUTING_ACTIONS == {"UNSHARD", "REDUCE_GRAD"}
