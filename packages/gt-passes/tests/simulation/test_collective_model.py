"""Times of collectives against numbers computed by hand from the formulas of the module."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_passes.simulation import h100_sxm
from gt_passes.simulation.collective_model import CollectiveModel, GroupLayout

H100 = h100_sxm()
MODEL = CollectiveModel(hardware=H100)
NODE = range(8)
FOUR_NODES = range(32)
GIB = 2**30


def test_ranks_lie_on_nodes_in_order():
    assert GroupLayout.of(FOUR_NODES, 8) == GroupLayout(num_ranks=32, num_nodes=4, ranks_per_node=8)
    assert GroupLayout.of(range(0, 32, 8), 8).ranks_per_node == 1
    assert GroupLayout.of([6, 7, 8], 8) == GroupLayout(num_ranks=3, num_nodes=2, ranks_per_node=1)


def test_large_all_gather_in_a_node_runs_at_nvlink_bus_bandwidth():
    """8.4 base + 7 steps of 3.4 + 1 GiB * 7/8 / 370 GB/s."""
    expected = 8.4 + 7 * 3.4 + 1e6 * GIB * 7 / 8 / 370e9
    assert MODEL.time_us("all_gather", GIB, NODE) == pytest.approx(expected)
    assert MODEL.time_us("reduce_scatter", GIB, NODE) == pytest.approx(expected)


def test_small_all_gather_in_a_node_takes_the_low_latency_protocol():
    """6.6 base + 7 steps of 0.6; the bytes hardly count."""
    expected = 6.6 + 7 * 0.6 + 1e6 * 1024 * 7 / 8 / (370e9 / 3)
    assert MODEL.time_us("all_gather", 1024, NODE) == pytest.approx(expected)


def test_all_gather_over_nodes_uses_the_nics_of_all_ranks_up_to_nvlink():
    """8.4 + 28 NVLink steps of 3.4 + 3 network steps of 14; 8 NICs carry 376 > 370 GB/s."""
    expected = 8.4 + 28 * 3.4 + 3 * 14.0 + 1e6 * GIB * 31 / 32 / 370e9
    assert MODEL.time_us("all_gather", GIB, FOUR_NODES) == pytest.approx(expected)


def test_all_gather_with_one_rank_a_node_is_bound_by_one_nic():
    expected = 8.4 + 3 * 14.0 + 1e6 * GIB * 3 / 4 / 47e9
    assert MODEL.time_us("all_gather", GIB, range(0, 32, 8)) == pytest.approx(expected)


def test_large_all_reduce_in_a_node_is_summed_in_the_switch():
    expected = 25.0 + 1e6 * GIB * 2 * 7 / 8 / 480e9
    assert MODEL.time_us("all_reduce", GIB, NODE) == pytest.approx(expected)


def test_all_reduce_of_two_ranks_is_a_ring():
    """8.4 + 2 steps of 3.4 + 1 GiB * 2 * 1/2 / 370 GB/s."""
    expected = 8.4 + 2 * 3.4 + 1e6 * GIB / 370e9
    assert MODEL.time_us("all_reduce", GIB, range(2)) == pytest.approx(expected)


def test_small_all_reduce_over_many_nodes_is_a_tree():
    """6.8 + 2 * (7 steps of 0.6 + log2(16) steps of 5.0), where a ring has 254 steps."""
    tree = 6.8 + 2 * (7 * 0.6 + 4 * 5.0)
    time_us = MODEL.time_us("all_reduce", 64, range(128))
    assert time_us == pytest.approx(tree, rel=1e-3)


def test_all_to_all_over_nodes_is_bound_by_what_leaves_the_node():
    """24 of 32 parts leave through one NIC: 8.4 + 14 + 30 peers + bytes * 24/32 / 47 GB/s."""
    expected = 8.4 + 14.0 + 30 * 1.0 + 1e6 * GIB * 24 / 32 / 47e9
    assert MODEL.time_us("all_to_all", GIB, FOUR_NODES) == pytest.approx(expected)


def test_all_to_all_in_a_node_stays_on_nvlink():
    expected = 8.4 + 3.4 + 6 * 1.0 + 1e6 * GIB * 7 / 8 / 370e9
    assert MODEL.time_us("all_to_all", GIB, NODE) == pytest.approx(expected)


def test_send_goes_over_nvlink_or_one_nic():
    assert MODEL.time_us("send_receive", GIB, [0, 1]) == pytest.approx(11.8 + 1e6 * GIB / 370e9)
    assert MODEL.time_us("send_receive", GIB, [0, 8]) == pytest.approx(22.4 + 1e6 * GIB / 47e9)


def test_a_group_of_one_copies_in_its_own_memory():
    expected = 2.0 + 2e6 * GIB / (3.35e12 * 0.9)
    assert MODEL.time_us("all_gather", GIB, [5]) == pytest.approx(expected)


def test_other_nodes_are_another_machine():
    wide = CollectiveModel(hardware=replace(H100, gpus_per_node=32))
    assert wide.time_us("all_to_all", GIB, FOUR_NODES) < MODEL.time_us(
        "all_to_all", GIB, FOUR_NODES
    )


KINDS = st.sampled_from(
    ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_receive"]
)


@given(KINDS, st.integers(0, 2**34), st.integers(0, 2**34), st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_more_bytes_never_take_less_time(kind, some, more, num_ranks):
    some, more = sorted((some, more))
    ranks = range(num_ranks)
    assert 0 < MODEL.time_us(kind, some, ranks) <= MODEL.time_us(kind, more, ranks)


@given(st.integers(0, 2**34), st.sampled_from([2, 4, 8, 16, 64]))
def test_all_reduce_is_at_least_as_long_as_all_gather_without_a_summing_switch(
    num_bytes, num_ranks
):
    model = CollectiveModel(hardware=replace(H100, nvls_min_ranks=1000))
    ranks = range(0, 8 * num_ranks, 8)
    gather = model.time_us("all_gather", num_bytes, ranks)
    # A tree has fewer steps than a ring, so compare where bytes decide.
    if num_bytes > 2**26:
        assert model.time_us("all_reduce", num_bytes, ranks) >= gather


@pytest.mark.parametrize(
    ("kind", "num_bytes", "ranks", "message"),
    [
        ("gossip", 1, [0, 1], "kind is 'gossip'; allowed: all_gather, reduce_scatter, all_reduce"),
        ("all_gather", -1, [0, 1], "num_bytes is -1; allowed: 0 or more"),
        ("all_gather", 1, [], r"ranks are \(\); allowed: one or more, each once"),
        ("all_gather", 1, [3, 3], r"ranks are \(3, 3\); allowed: one or more, each once"),
    ],
)
def test_refuses_what_is_no_collective(kind, num_bytes, ranks, message):
    with pytest.raises(ValueError, match=message):
        MODEL.time_us(kind, num_bytes, ranks)


def test_a_gathering_in_a_node_takes_16_multiprocessors_and_twice_its_bus_bandwidth():
    """Nearly 370 GB/s are read and as many written, of 0.9 * 3.35 TB/s."""
    taken = MODEL.taken("all_gather", GIB, NODE)
    assert taken.compute == 16 / 132
    assert taken.memory == pytest.approx(2 * 370e9 / (0.9 * 3.35e12), rel=0.02)
    assert taken == MODEL.taken("reduce_scatter", GIB, NODE)


@pytest.mark.parametrize(
    ("ranks", "num_sms"), [(range(0, 32, 8), 2), (range(0, 32, 4), 4), (FOUR_NODES, 16)]
)
def test_two_multiprocessors_serve_a_nic(ranks, num_sms):
    assert MODEL.taken("all_gather", GIB, ranks).compute == num_sms / 132


def test_a_small_collective_takes_multiprocessors_and_hardly_any_bandwidth():
    taken = MODEL.taken("all_reduce", 1024, NODE)
    assert (taken.compute, taken.memory) == (16 / 132, pytest.approx(0, abs=1e-3))


def test_memory_serves_a_collective_and_its_neighbours_alike():
    slow = CollectiveModel(hardware=replace(H100, hbm_bytes_per_s=3.7e11))
    assert slow.taken("all_gather", GIB, NODE).memory == 0.5


def test_a_group_of_one_takes_nothing():
    assert MODEL.taken("all_gather", GIB, [3]) == (0, 0)
