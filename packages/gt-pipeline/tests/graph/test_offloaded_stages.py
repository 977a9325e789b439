"""What a stage keeps between forward and backward waits in host memory, and no bit changes."""

from __future__ import annotations

import torch
from stage_models import ACTIVATION, Block
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from gt_passes import (
    OffloadTagged,
    PassContext,
    PassManager,
    RecomputeTagged,
    TagSavedTensors,
)
from gt_passes.analysis.host_copies import OFFLOAD, RELOAD
from gt_pipeline.graph import GraphPipelineStage, StageCapture
from gt_pipeline.runner import MicrobatchInputs


class Layers(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def offload(capture: StageCapture, **options: int | None) -> None:
    """The policy ``offload``, as a trainer's recipe has it on a stage."""
    names = tuple(each.name for each in capture.traced.inputs[: capture.traced.num_static_inputs])
    context = PassContext(fake_mode=capture.traced.fake_mode, static_input_names=names)
    passes = [
        TagSavedTensors(policy="offload", offload_min_bytes=1, **options),
        RecomputeTagged(),
        OffloadTagged(cut_after_forward=True),
    ]
    report = PassManager(passes, context=context).run(capture.traced.graph_module)
    assert report.records[-1].report.refusals == ()


def select(capture: StageCapture) -> None:
    """The same values kept, on the device."""
    names = tuple(each.name for each in capture.traced.inputs[: capture.traced.num_static_inputs])
    context = PassContext(fake_mode=capture.traced.fake_mode, static_input_names=names)
    passes = [TagSavedTensors(policy="selective"), RecomputeTagged()]
    PassManager(passes, context=context).run(capture.traced.graph_module)


def new_stage(prepare: object = None, **options: object) -> GraphPipelineStage:
    torch.manual_seed(0)
    return GraphPipelineStage(
        Layers(),
        stage_index=1,
        num_stages=3,
        activations=[ACTIVATION],
        prepare_capture=prepare,
        **options,
    )


def trained(stage: GraphPipelineStage) -> list[Tensor]:
    """Three microbatches under way: a whole backward, one in halves, and one in a pair."""
    generator = torch.Generator().manual_seed(1)

    def rows() -> tuple[Tensor, ...]:
        return (torch.randn(4, 8, generator=generator),)

    found: list[Tensor] = []
    for number in range(3):
        found += stage.forward(number, rows(), MicrobatchInputs())
    found += stage.full_backward(1, rows())
    found += stage.backward_input(0, rows())
    outputs, gradients = stage.overlap(
        3,
        rows(),
        MicrobatchInputs(),
        backward_stage=stage,
        backward_kind="FULL_BACKWARD",
        backward_microbatch=2,
        output_gradients=rows(),
    )
    found += [*outputs, *gradients]
    stage.backward_weight(0)
    found += stage.full_backward(3, rows())
    stage.reduce_gradients()
    found += stage.gradients().values()
    stage.discard()
    return found


def test_gradients_keep_every_bit() -> None:
    plain, offloaded = trained(new_stage()), trained(new_stage(offload))
    assert len(plain) == len(offloaded) > 20
    assert all(map(torch.equal, plain, offloaded))


def copies(graph_module: GraphModule, target: object) -> list[Node]:
    return graph_module.graph.find_nodes(op="call_function", target=target)


def test_a_forward_copies_out_and_its_backward_copies_in() -> None:
    graphs = new_stage(offload).graphs
    num_out = len(copies(graphs.forward.graph_module, OFFLOAD))
    assert num_out > 0
    assert copies(graphs.forward.graph_module, RELOAD) == []
    assert len(copies(graphs.full_backward.graph_module, RELOAD)) == num_out
    assert copies(graphs.full_backward.graph_module, OFFLOAD) == []


def saved_bytes(stage: GraphPipelineStage) -> dict[str, int]:
    """What one microbatch keeps, by device, read off the signature of FORWARD."""
    found: dict[str, int] = {}
    forward = stage.graphs.forward
    for slot, node in zip(forward.outputs, forward.result_nodes(), strict=True):
        value = node.meta["val"]
        if slot.kind == "saved":
            found[value.device.type] = found.get(value.device.type, 0) + value.nbytes
    return found


def test_what_a_microbatch_keeps_on_the_device_falls() -> None:
    with torch.device("meta"):
        kept = saved_bytes(new_stage(select, device="meta"))
        stage = new_stage(offload, device="meta")
    offloaded = saved_bytes(stage)
    assert kept["meta"] == offloaded["meta"] + offloaded["cpu"]
    assert offloaded["cpu"] > 0.5 * kept["meta"]
    # What dW alone reads comes back for it.
    between = [node.meta["val"] for node in stage.graphs.of("BACKWARD_INPUT").result_nodes()]
    assert [each.shape for each in between if each.device.type == "cpu"] == [(4, 8)] * 2
