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
from gt_passes.simulation.compute_model import device_time
from gt_passes.simulation.cost_model import CostModel, HostModel
from gt_passes.simulation.graph_program import GraphProgram
from gt_passes.simulation.hardware import (
    Hardware,
    h100_hbm2e_500w,
    h100_sxm,
    shipped_hardware,
)
from gt_passes.simulation.perfetto import write_perfetto_trace
from gt_passes.simulation.sensitivity import Sensitivity, sensitivity, step_sensitivity
from gt_passes.simulation.step_simulation import (
    PurposeTotal,
    StepSimulation,
    simulate_step,
    totals_by_purpose,
)
from gt_passes.simulation.throughput import (
    model_flops_utilization,
    optimizer_step_us,
    tokens_per_second_per_gpu,
)
from gt_passes.simulation.timeline import schedule
from gt_passes.simulation.work import MatmulShape, OpWork

__all__ = [
    "CostModel",
    "GraphProgram",
    "Hardware",
    "HostModel",
    "MatmulShape",
    "OpWork",
    "PurposeTotal",
    "Sensitivity",
    "StepSimulation",
    "SymbolSizes",
    "balanced_exchange_sizes",
    "device_time",
    "h100_hbm2e_500w",
    "h100_sxm",
    "model_flops_utilization",
    "optimizer_step_us",
    "schedule",
    "sensitivity",
    "shipped_hardware",
    "simulate_step",
    "step_sensitivity",
    "tokens_per_second_per_gpu",
    "totals_by_purpose",
    "write_perfetto_trace",
]
