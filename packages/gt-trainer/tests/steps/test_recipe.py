"""Which passes the options of a run ask for, where a graph runs and where it is only simulated."""

from __future__ import annotations

from dataclasses import replace

from gt_config import CompileConfig
from gt_passes import DescribeOnly, SymmetricMemoryOnPaper
from gt_passes.simulation import h100_sxm
from gt_passes.tensor_parallel.symmetric_memory import SymmetricMemoryHere
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
from gt_trainer.steps.recipe import passes_of


def symmetric_memory(**options):
    passes = passes_of(CompileConfig(async_tensor_parallel=True), "STEP", **options)
    (found,) = (each for each in passes if each.name == "async-tensor-parallel")
    return found.symmetric_memory


def test_a_graph_that_runs_has_the_symmetric_memory_of_this_machine() -> None:
    assert symmetric_memory() == SymmetricMemoryHere()


def test_a_graph_that_is_only_simulated_has_that_of_the_planned_machine() -> None:
    assert symmetric_memory(compiler=DescribeOnly()) == SymmetricMemoryOnPaper(gpus_per_node=8)
    of_four = replace(h100_sxm(), gpus_per_node=4)
    with planned_for(PlannedMachine(hardware=of_four, is_simulated=True)):
        found = symmetric_memory(compiler=DescribeOnly())
    assert found == SymmetricMemoryOnPaper(gpus_per_node=4)
