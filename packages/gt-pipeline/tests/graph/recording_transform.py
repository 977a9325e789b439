"""A transform that has a stage's graphs recorded, by imitated recordings. Workers import it."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from gt_config.node_keys import PipelineAction
from gt_passes import CudaGraphs, PassContext, PassManager
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.testing import FakeRecorder


def recording(recorder: FakeRecorder) -> Callable[[GraphModule, PipelineAction, PassContext], None]:
    """A transform that marks what can be recorded, as if the CPU were a GPU."""
    target = CaptureTarget(
        device_type="cpu",
        backend_of_group=lambda group_name: "gloo",
        capturable_backends=frozenset({"gloo"}),
    )

    def transform(graph_module: GraphModule, kind: PipelineAction, context: PassContext) -> None:
        graphs = CudaGraphs(target=target, new_recorder=lambda: recorder, min_kernels=1)
        (record,) = PassManager([graphs], context=context).run(graph_module).records
        computes = kind not in ("UNSHARD", "REDUCE_GRAD")
        assert record.report.counts.get("actions_recorded", 0) == computes, record.report
        assert record.report.counts["nodes"] > 0

    return transform
