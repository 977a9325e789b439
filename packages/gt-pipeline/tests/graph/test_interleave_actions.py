"""Two actions in one graph take turns, so that neither waits while the other has work.

::

    backward  2 ops  a2a 1>         <1 3 ops  a2a 3>         <3
    forward                  a2a 2>                   <2 ...
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from exchange_stages import ExchangeStage, overlap_like_one_after_the_other, overlapped
from expecttest import assert_expected_inline
from lane_pictures import draw_lanes
from stage_models import ACTIVATION, Block, CountingBlock
from torch.fx import GraphModule, Node

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_passes import CompileWholeGraph, DescribeOnly, PassContext, PassManager, Verifier
from gt_passes.analysis.outlined_region import region_of
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph import (
    GraphPipelineStage,
    capture_stage,
    cut_stage,
    exposed_collectives,
)
from gt_pipeline.graph.executables import GraphTransform
from gt_pipeline.graph.interleave_actions import InterleaveActions
from gt_pipeline.graph.overlapped_actions import concatenate_actions, overlap_actions
from gt_trace.testing import GlooWorkers, fake_world


@pytest.fixture(autouse=True, scope="module")
def one_of_two_ranks() -> Iterator[None]:
    with fake_world(rank=0, world_size=2):
        yield


def test_golden_of_a_forward_and_a_whole_backward() -> None:
    pair = overlapped(1, 1, "FULL_BACKWARD")
    assert_expected_inline(
        draw_lanes(pair.action.graph_module),
        """\
backward  2 ops all_to_all 1> 3 ops .     .             <1 3 ops all_to_all 3> 4 ops .  .     .             <3 6 ops .  .
forward   .     .             .     2 ops all_to_all 2> .  .     .             .     <2 3 ops all_to_all 4> .  .     <4 3 ops
""",
    )


def test_golden_of_a_forward_and_the_backward_of_inputs() -> None:
    pair = overlapped(1, 1, "BACKWARD_INPUT")
    assert_expected_inline(
        draw_lanes(pair.action.graph_module),
        """\
backward  2 ops all_to_all 1> 1 op .     .             <1 3 ops all_to_all 3> .  .     .             <3 4 ops .  .
forward   .     .             .    2 ops all_to_all 2> .  .     .             <2 3 ops all_to_all 4> .  .     <4 3 ops
""",
    )


def test_golden_of_sizes_that_depend_on_data() -> None:
    pair = overlapped(1, 1, "FULL_BACKWARD", by_data=True)
    assert_expected_inline(
        draw_lanes(pair.action.graph_module),
        """\
backward  2 ops all_to_all 1> 3 ops .     .             <1 2 ops .  .             1 op all_to_all 4> 4 ops .  .     .             <4 6 ops .  .
forward   .     .             .     7 ops all_to_all 2> .  .     <2 all_to_all 3> .    .             .     <3 3 ops all_to_all 5> .  .     <5 3 ops
""",
    )


@pytest.mark.parametrize(
    ("forward_layers", "backward_layers", "kind", "by_data"),
    [
        (2, 2, "FULL_BACKWARD", False),
        (2, 2, "BACKWARD_INPUT", False),
        (1, 3, "FULL_BACKWARD", False),
        (3, 1, "BACKWARD_INPUT", False),
        (2, 2, "FULL_BACKWARD", True),
        (0, 2, "FULL_BACKWARD", False),
        (2, 0, "FULL_BACKWARD", False),
    ],
)
def test_no_collective_is_exposed_while_the_other_action_has_work(
    forward_layers: int, backward_layers: int, kind: OverlappedBackward, by_data: bool
) -> None:
    pair = overlapped(forward_layers, backward_layers, kind, by_data=by_data)
    one_after_the_other = concatenate_actions(pair.forward, pair.backward)
    assert exposed_collectives(pair.action.graph_module) == ()
    if backward_layers:
        exposed = exposed_collectives(one_after_the_other.action.graph_module)
        assert len(exposed) == 2 * backward_layers


def test_a_backward_that_begins_with_an_exchange_launches_it_before_anything_else() -> None:
    pair = overlapped(1, 1, "FULL_BACKWARD", ends_in_exchange=True)
    graph_module = pair.action.graph_module
    assert_expected_inline(
        draw_lanes(graph_module),
        """\
backward  all_to_all 1> .    <1 2 ops all_to_all 2> 3 ops .    .             <2 3 ops all_to_all 4> 4 ops .  .     .             <4 6 ops .  .
forward   .             1 op .  .     .             .     1 op all_to_all 3> .  .     .             .     <3 3 ops all_to_all 5> .  .     <5 3 ops
""",
    )
    assert exposed_collectives(graph_module) == ()


def test_an_exposed_collective_says_which() -> None:
    pair = overlapped(1, 1, "FULL_BACKWARD")
    one_after_the_other = concatenate_actions(pair.forward, pair.backward)
    first, *_ = exposed_collectives(one_after_the_other.action.graph_module)
    assert str(first) == (
        "FULL_BACKWARD of stage 2: between all_to_all_single_2 and wait_tensor_2 the other action "
        "computes nothing, and computes later"
    )


def test_collectives_run_in_the_same_order_whatever_the_durations() -> None:
    pair = overlapped(1, 2, "FULL_BACKWARD")
    orders = []
    for duration_us in (lambda _: 1.0, lambda node: float(len(node.name) % 5)):
        graph_module = concatenate_actions(pair.forward, pair.backward).action.graph_module
        interleave = InterleaveActions(durations=lambda _, us=duration_us: us)
        interleave.run(graph_module, PassContext.from_graph(graph_module))
        orders.append(
            [node.name for node in graph_module.graph.nodes if "all_to_all" in str(node.target)]
        )
    assert orders[0] == orders[1]
    assert len(orders[0]) == 6


def test_a_second_run_exposes_nothing_either() -> None:
    pair = overlapped(2, 1, "FULL_BACKWARD", by_data=True)
    graph_module = concatenate_actions(pair.forward, pair.backward).action.graph_module
    context = PassContext.from_graph(graph_module)
    PassManager([InterleaveActions(), InterleaveActions()], context=context).run(graph_module)
    assert exposed_collectives(graph_module) == ()


def test_a_graph_of_one_action_is_left_alone() -> None:
    graphs = cut_stage(
        capture_stage(Block(), stage_index=1, num_stages=3, activations=[ACTIVATION])
    )
    graph_module = graphs.forward.graph_module
    report = InterleaveActions().run(graph_module, PassContext.from_graph(graph_module))
    assert not report.changed


def test_both_actions_of_one_stage_take_its_state_once() -> None:
    graphs = cut_stage(
        capture_stage(CountingBlock(), stage_index=1, num_stages=3, activations=[ACTIVATION])
    )
    assert graphs.full_backward is not None
    pair = overlap_actions(graphs.forward, graphs.full_backward)
    static = [slot.name for slot in pair.action.inputs if slot.is_static]
    assert len(static) == len(set(static)) == len(graphs.forward.static_inputs)
    assert Verifier().verify(pair.action.graph_module).problems == ()


def test_refuses_actions_whose_fake_values_are_of_two_modes() -> None:
    graphs = [
        cut_stage(capture_stage(Block(), stage_index=i, num_stages=4, activations=[ACTIVATION]))
        for i in (1, 2)
    ]
    assert graphs[1].full_backward is not None
    with pytest.raises(StageCutError) as caught:
        overlap_actions(graphs[0].forward, graphs[1].full_backward)
    assert str(caught.value) == (
        "FORWARD of stage 1 and FULL_BACKWARD of stage 2 cannot overlap:\n"
        "  - they were captured with different fake modes; give one's to the other"
    )


@pytest.mark.parametrize(("by_data", "same_stage"), [(False, False), (True, True)])
def test_overlapped_actions_compute_the_same_bits(
    by_data: bool, same_stage: bool, two: GlooWorkers
) -> None:
    for same in two.run(overlap_like_one_after_the_other, by_data, same_stage):
        assert len(same) > 10
        assert all(same)


def launched(line: str) -> str:
    return line.split(", exchange ")[0]


def test_a_stage_names_the_collectives_of_its_actions_and_pairs() -> None:
    stage = GraphPipelineStage(
        ExchangeStage(1, by_data=False), stage_index=1, num_stages=4, activations=[ACTIVATION]
    )
    alone = stage.collectives()
    assert {name: len(lines) for name, lines in alone.items()} == {
        "FORWARD": 2,
        "FULL_BACKWARD": 2,
        "BACKWARD_INPUT": 2,
    }
    assert stage.group_names() == (dist.group.WORLD.group_name,)
    stage.prepare_overlap(stage, "FULL_BACKWARD")
    pair = stage.collectives()["FORWARD with FULL_BACKWARD of stage 1"]
    # Exchanges are numbered in each graph that was verified.
    one_after_the_other = (*alone["FORWARD"], *alone["FULL_BACKWARD"])
    assert sorted(map(launched, pair)) == sorted(map(launched, one_after_the_other))
    stage.prepare_evaluation()
    assert stage.collectives()["FORWARD of evaluation 0"] == alone["FORWARD"]
    assert pair[0].startswith("_c10d_functional.all_to_all_single over 2 ranks, 1 apart: ")


def test_a_compiled_stage_names_the_collectives_that_it_was_made_of() -> None:
    def compiled(graph_module: GraphModule, kind: PipelineAction, context: PassContext) -> None:
        compile_all = CompileWholeGraph(compiler=DescribeOnly())
        PassManager([compile_all], context=context).run(graph_module)
        assert all(map(is_of_a_region, graph_module.graph.nodes))

    def is_of_a_region(node: Node) -> bool:
        is_a_region = region_of(node) is not None or node.target is operator.getitem
        return node.op != "call_function" or is_a_region

    def stage(transform: GraphTransform | None) -> GraphPipelineStage:
        return GraphPipelineStage(
            ExchangeStage(1, by_data=False),
            stage_index=1,
            num_stages=4,
            activations=[ACTIVATION],
            transform=transform,
        )

    plain, whole = stage(None).collectives(), stage(compiled).collectives()
    assert {name: [*map(launched, lines)] for name, lines in whole.items()} == {
        name: [*map(launched, lines)] for name, lines in plain.items()
    }
    assert whole["FORWARD"]
