"""SeparateExchangeGroup gives token exchanges a communicator that counts do not queue on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ep_overlap.chunked_graphs import capture_forward, exchanged, forward_region
from pass_graphs import capture, collectives, program, run_pass

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes import SeparateExchangeGroup, SeparateReductionGroup
from gt_passes.analysis.process_groups import group_name_of
from gt_trace import annotate
from gt_trace.testing import fake_world


def of_chunk(part):
    counts = exchanged(part.sum(dim=1).long(), kind="token_count_exchange")
    return exchanged(part * counts.sum().item())


def test_tokens_go_over_the_second_group_and_counts_over_the_first():
    graph_module = capture(lambda x: forward_region(x, 2, of_chunk=of_chunk), torch.ones(8, 2))
    asked = []

    def second(name):
        asked.append(name)
        return f"{name}, second"

    separate = SeparateExchangeGroup(second_group=second)
    assert separate.run(graph_module, None).counts == {"exchanges_moved": 2}
    lines = [
        line
        for line in program(graph_module).splitlines()
        if "= _c10d_functional.all_to_all" in line
    ]
    assert ["second" in line for line in lines] == [False, True, False, True]
    assert asked == ["ep"]
    assert not separate.run(graph_module, None).changed


def test_reductions_and_exchanges_of_one_group_do_not_share_a_second():
    """Where each rank holds other experts, FSDP's group is that of the experts."""
    with fake_world(rank=0, world_size=2):
        group = dist.group.WORLD.group_name

        def step(w, x, dy):
            whole = collectives.wait_tensor(fsdp(collectives.all_gather_into_tensor, w, 2, group))
            y = forward_region(x @ whole, 2, of_chunk=lambda part: exchanged(part, group=group))
            return y, collectives.wait_tensor(
                fsdp(collectives.reduce_scatter_tensor, dy, "sum", 2, group, kind="reduce_grad")
            )

        graph_module = capture(step, torch.ones(1, 2), torch.ones(8, 2), torch.ones(2, 2))
        assert run_pass(SeparateReductionGroup(), graph_module).counts == {"reductions_moved": 1}
        assert run_pass(SeparateExchangeGroup(), graph_module).counts == {"exchanges_moved": 2}
        groups = {
            kind: {
                group_name_of(node) for node in graph_module.graph.nodes if kind in str(node.target)
            }
            for kind in ("all_gather", "reduce_scatter", "all_to_all")
        }
    assert all(len(names) == 1 for names in groups.values())
    assert len(set.union(*groups.values())) == 3


def fsdp(collective, tensor, *options, kind="unshard"):
    """A collective of FSDP, annotated as one."""
    with annotate(
        FsdpCollectiveAnnotation(kind=kind, parameter_names=("layers.0.w",), mesh_axis="fsdp")
    ):
        return collective(tensor, *options)


def test_a_group_that_nothing_else_uses_is_kept():
    graph_module = capture_forward(2)
    before = program(graph_module)
    report = run_pass(SeparateExchangeGroup(), graph_module)
    assert not report.changed
    assert {each.reason for each in report.refusals} == {"nothing else uses group 'ep'"}
    assert program(graph_module) == before


def test_exchanges_outside_of_chunks_keep_their_group():
    graph_module = capture(of_chunk, torch.ones(4, 2))
    assert not run_pass(SeparateExchangeGroup(), graph_module).changed
