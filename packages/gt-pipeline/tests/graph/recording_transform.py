"""A transform that has a stage's actions recorded, by imitated recordings. Workers import it."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import CudaGraphs, PassContext, PassManager
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.testing import FakeRecorder


def recording(recorder: FakeRecorder) -> Callable[[GraphModule, PipelineAction, PassContext], None]:
    """A transform that marks what can be recorded, as if the CPU were a GPU."""

    def transform(graph_module: GraphModule, kind: PipelineAction, context: PassContext) -> None:
        if kind in ("UNSHARD", "REDUCE_GRAD"):
            return
        graphs = CudaGraphs(
            target=CaptureTarget(device_type="cpu"), new_recorder=lambda: recorder, min_kernels=1
        )
        (record,) = PassManager([graphs], context=context).run(graph_module).records
        assert record.report.counts["actions_recorded"] == 1

    return transform
