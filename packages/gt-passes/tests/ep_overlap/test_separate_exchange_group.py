"""SeparateExchangeGroup gives token exchanges a communicator that counts do not queue on."""

from __future__ import annotations

import torch
from ep_overlap.chunked_graphs import capture_forward, exchanged, forward_region
from pass_graphs import capture, program, run_pass

from gt_passes import SeparateExchangeGroup


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
