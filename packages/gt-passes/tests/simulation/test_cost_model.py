"""The price of single nodes, and of collectives without a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exchange_graphs import capture_exchange
from pass_graphs import capture, collectives

from gt_passes.simulation import CostModel, SymbolSizes, balanced_exchange_sizes, h100_sxm
from gt_passes.simulation.cost_model import UnknownProcessGroupError

aten = torch.ops.aten
BF16 = torch.bfloat16
GROUPS = {"tp": (0, 1), "ep": (0, 1, 2, 3), "dp": tuple(range(0, 32, 8))}


def model(**options: object) -> CostModel:
    return CostModel(ranks_of_group=GROUPS.__getitem__, **options)


def gathering(group: str = "tp"):
    def step(x):
        return collectives.wait_tensor(collectives.all_gather_into_tensor(x, 2, group)) * 2

    return capture(step, torch.ones(2**20))


def node_of(graph_module, target):
    return graph_module.graph.find_nodes(op="call_function", target=target)[0]


def test_a_product_says_what_it_costs_and_why():
    x = torch.ones(4096, 4096, dtype=BF16)
    cost = model().cost(node_of(capture(torch.mm, x, x.clone()), aten.mm.default))
    assert cost.bound == "compute"
    assert cost.flops == 2 * 4096**3
    assert cost.moved_bytes == 3 * 2 * 4096**2
    assert 2.0 + 1e6 * cost.flops / 989.4e12 / 0.75 <= cost.duration_us < 250
    assert cost.host_us == h100_sxm().host_kernel_us


def test_a_sum_is_bound_by_memory_and_a_tiny_one_by_its_launch():
    large = capture(torch.add, torch.ones(2**24), torch.ones(2**24))
    assert model().cost(node_of(large, aten.add.Tensor)).bound == "memory"
    tiny = capture(torch.add, torch.ones(2), torch.ones(2))
    assert model().cost(node_of(tiny, aten.add.Tensor)).bound == "host"


def test_a_collective_costs_what_the_model_of_nccl_says_for_its_ranks():
    cost_model = model()
    for group, ranks in (("tp", (0, 1)), ("dp", (0, 8, 16, 24))):
        launch = node_of(gathering(group), collectives.all_gather_into_tensor.default)
        cost = cost_model.cost(launch)
        assert cost.kind == "collective"
        assert cost.collective is not None
        assert cost.collective.group_name == group
        assert cost.moved_bytes == 2 * 4 * 2**20
        expected = cost_model.collective_us("all_gather", 2 * 4 * 2**20, ranks)
        assert cost.duration_us == expected


def test_an_exchange_is_priced_at_the_balanced_sizes():
    graph = capture_exchange(rows=64, width=8)
    balanced = model(sizes=SymbolSizes(balanced_exchange_sizes(graph)))
    launch = node_of(graph, collectives.all_to_all_single.default)
    assert balanced.cost(launch).moved_bytes == 4 * 64 * 8


def test_an_unknown_group_is_an_error_that_says_how_to_name_its_ranks():
    launch = node_of(gathering("moon"), collectives.all_gather_into_tensor.default)
    with pytest.raises(UnknownProcessGroupError) as caught:
        CostModel().cost(launch)
    assert str(caught.value) == (
        "the graph uses the process group 'moon', which this process does not have: simulate "
        "where the graph was captured, or say CostModel(ranks_of_group=...)"
    )


def test_torch_knows_the_ranks_of_its_own_groups(one_rank_group):
    assert tuple(CostModel().group_ranks(one_rank_group)) == (0,)


def test_a_wait_costs_the_host_and_nothing_else():
    cost = model().cost(node_of(gathering(), collectives.wait_tensor.default))
    assert (cost.duration_us, cost.host_us) == (0.0, h100_sxm().host_wait_us)


def test_replay_from_a_cuda_graph_costs_the_host_nothing():
    add = node_of(capture(torch.add, torch.ones(8), torch.ones(8)), aten.add.Tensor)
    eager, replayed = model().cost(add), model(host="cuda_graph").cost(add)
    assert replayed.host_us == 0
    gap = h100_sxm().graph_replay_kernel_us
    assert replayed.duration_us == pytest.approx(eager.duration_us + gap)


def test_equal_nodes_are_priced_once():
    graph = capture(lambda x: (x * 2) * 2, torch.ones(8))
    first, second = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    cost_model = model()
    assert cost_model.cost(first) is cost_model.cost(second)


def test_masked_attention_is_not_mixed_up_with_full_attention():
    def attend(q, k, v):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = q.new_zeros(1, 1, 256, 256)
        results = flash(q, k, v), flash(q, k, v, 0.0, True), flash(q, k, v, attn_mask=mask)
        return tuple(result[0] for result in results)

    q = torch.ones(2, 8, 256, 64, dtype=BF16)
    graph = capture(attend, q, q.clone(), q.clone())
    nodes = graph.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    hardware = replace(h100_sxm(), hbm_bytes_per_s=1e18, kernel_fixed_us=1e-9)
    full, causal, masked = (model(hardware=hardware).cost(node).duration_us for node in nodes)
    assert causal == masked == pytest.approx(full / 2, rel=1e-6)


def test_another_machine_keeps_the_assumptions():
    graph = capture_exchange()
    cost_model = model(sizes=SymbolSizes(balanced_exchange_sizes(graph)))
    slower = cost_model.with_hardware(h100_sxm().scaled("network", 0.5))
    launch = node_of(graph, collectives.all_to_all_single.default)
    assert slower.cost(launch).moved_bytes == cost_model.cost(launch).moved_bytes
    assert slower.cost(launch).duration_us > cost_model.cost(launch).duration_us
