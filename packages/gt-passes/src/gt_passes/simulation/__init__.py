"""What a captured step would cost on a machine that is not here: cost model and timeline.

::

    sizes = SymbolSizes(balanced_exchange_sizes(graph_module))
    cost_model = CostModel(h100_sxm(), sizes=sizes)
    simulation = simulate_step(graph_module, cost_model)
    print(simulation.table())

Prices of single nodes (``CostModel.cost``) and of collectives without a graph
(``CostModel.collective_us``) stand alone, and so does the scheduler (``schedule``), which knows
tasks and streams only. Nothing here was measured: the numbers come from one data file
(``h100_sxm.json``), each with its source. See docs/decisions/0007-cost-model.md.
"""

from gt_passes.analysis.symbol_sizes import SymbolSizes, balanced_exchange_sizes
from gt_passes.simulation.collective_launch import (
    CollectiveLaunch,
    RanksOfGroup,
    UnknownCollectiveError,
    UnknownProcessGroupError,
    collective_launch,
    ranks_of_torch_group,
)
from gt_passes.simulation.collective_model import CollectiveKind, CollectiveModel, GroupLayout
from gt_passes.simulation.compiled_region import FusedKernel, compiled_kernels
from gt_passes.simulation.compute_model import DeviceTime, device_time, matmul_us
from gt_passes.simulation.cost_model import CostModel, HostModel, OpCost
from gt_passes.simulation.graph_program import COMPUTE_STREAM, COPY_STREAM, GraphProgram, GraphRun
from gt_passes.simulation.hardware import (
    Constant,
    Hardware,
    HardwareDataError,
    h100_sxm,
    load_hardware,
)
from gt_passes.simulation.operands import PricedOperand
from gt_passes.simulation.perfetto import trace_events, write_perfetto_trace
from gt_passes.simulation.sensitivity import (
    Sensitivity,
    SensitivityRange,
    sensitivity,
    step_sensitivity,
)
from gt_passes.simulation.step_simulation import (
    CollectiveRecord,
    PurposeTotal,
    StepSimulation,
    simulate_step,
)
from gt_passes.simulation.throughput import (
    model_flops_utilization,
    optimizer_step_us,
    tokens_per_second_per_gpu,
)
from gt_passes.simulation.timeline import Stall, Task, TaskOrderError, Timeline, schedule
from gt_passes.simulation.work import MatmulShape, OpKind, OpWork, WorkRule, work_of

__all__ = [
    "COMPUTE_STREAM",
    "COPY_STREAM",
    "CollectiveKind",
    "CollectiveLaunch",
    "CollectiveModel",
    "CollectiveRecord",
    "Constant",
    "CostModel",
    "DeviceTime",
    "FusedKernel",
    "GraphProgram",
    "GraphRun",
    "GroupLayout",
    "Hardware",
    "HardwareDataError",
    "HostModel",
    "MatmulShape",
    "OpCost",
    "OpKind",
    "OpWork",
    "PricedOperand",
    "PurposeTotal",
    "RanksOfGroup",
    "Sensitivity",
    "SensitivityRange",
    "Stall",
    "StepSimulation",
    "SymbolSizes",
    "Task",
    "TaskOrderError",
    "Timeline",
    "UnknownCollectiveError",
    "UnknownProcessGroupError",
    "WorkRule",
    "balanced_exchange_sizes",
    "collective_launch",
    "compiled_kernels",
    "device_time",
    "h100_sxm",
    "load_hardware",
    "matmul_us",
    "model_flops_utilization",
    "optimizer_step_us",
    "ranks_of_torch_group",
    "schedule",
    "sensitivity",
    "simulate_step",
    "step_sensitivity",
    "tokens_per_second_per_gpu",
    "trace_events",
    "work_of",
    "write_perfetto_trace",
]
