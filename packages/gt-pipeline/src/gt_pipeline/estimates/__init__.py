"""Estimates of a captured step: the time of a pipeline's actions, the memory of ranks.

::

    stages = PricedStages(captured, schedule, cost_model, ranks=global_ranks)
    timeline = simulate(lower(schedule, unshards=True, reduces=True), stages.costs())
    memory = rank_memory(lowered, rank=0, stages=stages.memory, ...)

Nothing here runs a graph: prices and lifetimes are read off those that a run would execute.
"""

from gt_pipeline.estimates.action_memory import ActionMemory, StageMemory, local_parameters
from gt_pipeline.estimates.balanced_division import (
    PipelineUnits,
    UnitTimes,
    balanced_division,
)
from gt_pipeline.estimates.joined_memory import joined_memory, memory_of_one, overlapped_memory
from gt_pipeline.estimates.pipeline_time import PipelineTime, pipeline_time
from gt_pipeline.estimates.priced_stages import GraphRuns, PricedStages, symbol_sizes_of
from gt_pipeline.estimates.rank_memory import (
    ADAM_STATES,
    MEMORY_PARTS,
    RankMemory,
    graph_memory,
    rank_memory,
)

__all__ = [
    "ADAM_STATES",
    "MEMORY_PARTS",
    "ActionMemory",
    "GraphRuns",
    "PipelineTime",
    "PipelineUnits",
    "PricedStages",
    "RankMemory",
    "StageMemory",
    "UnitTimes",
    "balanced_division",
    "graph_memory",
    "joined_memory",
    "local_parameters",
    "memory_of_one",
    "overlapped_memory",
    "pipeline_time",
    "rank_memory",
    "symbol_sizes_of",
]
