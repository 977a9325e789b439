"""A captured graph on streams: what is exposed, to whom it is charged, and what is printed.

Drawings: one character is one microsecond, and every operator and collective takes the time that
the test gives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import replace

import pytest
import torch
from exchange_graphs import capture_exchange
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, unshard
from torch.fx import GraphModule, Node

from gt_config.node_keys import ChunkAnnotation
from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY
from gt_passes.simulation import (
    CostModel,
    StepSimulation,
    SymbolSizes,
    balanced_exchange_sizes,
    h100_sxm,
    simulate_step,
    step_sensitivity,
    write_perfetto_trace,
)
from gt_passes.simulation.cost_model import OpCost
from gt_passes.simulation.perfetto import trace_events
from gt_trace.node_metadata import write_annotation

RANKS = {"fsdp": range(8), "tp": range(2), "ep": range(4)}


class UnitCosts(CostModel):
    """Every operator takes 1 us, every collective and copy 4, and the host nothing."""

    def __init__(self) -> None:
        super().__init__(ranks_of_group=lambda name: tuple(RANKS[name]))

    def cost_of_key(self, key: Hashable, node: Node) -> OpCost:
        cost = super().cost_of_key(key, node)
        duration = 4.0 if cost.kind in ("collective", "host_copy") else float(cost.duration_us > 0)
        return replace(cost, duration_us=duration, host_us=0.0, needs=None)


def simulate(fn: Callable[..., object], *args: torch.Tensor) -> StepSimulation:
    return simulate_step(capture(fn, *args), UnitCosts())


def gather(x: torch.Tensor, group: str = "fsdp") -> torch.Tensor:
    return collectives.all_gather_into_tensor(x, len(RANKS[group]), group)


wait = collectives.wait_tensor
X = torch.ones(8)


def test_can_hide_a_gathering_behind_operators_in_between():
    """
    compute s123456m
    fsdp     GGGG
    """

    def step(x):
        launched = gather(x.sin())
        y = x
        for _ in range(6):
            y = y.cos()
        return wait(launched) * 2, y

    simulation = simulate(step, X)
    assert (simulation.step_us, simulation.exposed_us) == (8, 0)


def test_cannot_hide_a_gathering_that_is_waited_for_at_once():
    """
    compute s....123456m
    fsdp     GGGG
    """

    def step(x):
        gathered = wait(gather(x.sin()))
        y = x
        for _ in range(6):
            y = y.cos()
        return gathered * 2, y

    simulation = simulate(step, X)
    assert (simulation.step_us, simulation.compute_us, simulation.exposed_us) == (12, 8, 4)
    (record,) = simulation.collectives
    assert (record.start_us, record.duration_us, record.exposed_us) == (1, 4, 4)


def test_can_hide_part_of_a_gathering():
    """
    compute s1...m
    fsdp     GGGG
    """

    def step(x):
        launched = gather(x.sin())
        y = x.cos()
        return wait(launched) * 2, y

    assert simulate(step, X).exposed_us == 3


def test_cannot_overlap_two_collectives_of_one_group():
    """
    compute s........m
    fsdp     GGGGHHHH
    """

    def step(x):
        y = x.sin()
        first, second = gather(y), gather(x)
        return wait(first) * wait(second)

    simulation = simulate(step, X)
    assert simulation.step_us == 1 + 8 + 1
    assert [record.exposed_us for record in simulation.collectives] == [4, 4]


def test_can_overlap_collectives_of_two_groups():
    """
    compute s....m
    fsdp     GGGG
    tp       HHHH
    """

    def step(x):
        y = x.sin()
        first, second = gather(y), gather(x, "tp")
        return wait(first)[:8] * wait(second)[:8]

    assert simulate(step, X).step_us == 1 + 4 + 1


def test_a_collective_starts_after_what_was_launched_before_it():
    """It records an event on the compute stream, whatever its input is.

    compute 123....m
    fsdp       GGGG
    """

    def step(x):
        y = x.sin().cos().tan()
        return wait(gather(x)) * 2, y

    simulation = simulate(step, X)
    assert simulation.collectives[0].start_us == 3


def test_can_hide_a_copy_from_the_host_but_not_one_that_is_waited_for_at_once():
    """
    compute s....1234567890m
    copies   OOOORRRR
    """

    def step(x):
        y = x.sin()
        host = OFFLOAD(y)
        ready = WAIT_COPY(host, y)
        back = RELOAD(ready, x.device)
        z = x
        for _ in range(10):
            z = z.cos()
        return WAIT_COPY(back, ready) * 2, z

    simulation = simulate(step, X)
    # The first wait is at once: the copy out is exposed, the copy back is hidden.
    assert (simulation.copies_exposed_us, simulation.exposed_us) == (4, 0)
    assert simulation.step_us == 1 + 4 + 10 + 1
    assert "waiting for copies      0.00 ms (2 to and from the host" in simulation.table()


def test_collectives_are_charged_to_what_they_are_for():
    def step(x, weight):
        whole = unshard(weight, group="fsdp", num_ranks=8)
        return wait(gather(x, "tp")) * 2, whole * 3

    simulation = simulate_step(
        capture(step, X, X), UnitCosts(), group_labels={"tp": "tensor parallel"}
    )
    totals = {total.purpose: total for total in simulation.by_purpose}
    assert totals.keys() == {"FSDP unshard", "tensor parallel"}
    assert totals["FSDP unshard"].num_bytes == 4 * 64
    assert simulation.exposed_us == sum(total.exposed_us for total in simulation.by_purpose)


def test_a_group_without_a_label_goes_by_its_name():
    (record,) = simulate(lambda x: wait(gather(x, "tp")) * 2, X).collectives
    assert record.purpose == "group tp"


def test_reading_sizes_makes_the_host_wait_for_the_device():
    graph = capture_exchange(rows=2**16, width=2**10)
    sizes = SymbolSizes(balanced_exchange_sizes(graph))
    cost_model = CostModel(sizes=sizes, ranks_of_group=lambda name: range(4))
    assert simulate_step(graph, cost_model).host_idle_us > h100_sxm().host_collective_us


def test_sizes_that_nobody_knows_are_told():
    graph = capture_exchange()
    cost_model = CostModel(ranks_of_group=lambda name: range(4))
    table = simulate_step(graph, cost_model).table()
    assert "sizes counted as 1      4 data-dependent symbols, such as u" in table


def test_the_parts_of_the_compute_stream_make_the_whole():
    def step(x, weight):
        return (unshard(weight, group="fsdp", num_ranks=8) * 2).sum() + x.sum()

    graph = capture(step, torch.ones(2**20), torch.ones(2**20))
    cost_model = CostModel(ranks_of_group=lambda name: range(8))
    simulation = simulate_step(graph, cost_model)
    parts = simulation.compute_us + simulation.exposed_us + simulation.host_idle_us
    assert simulation.step_us == pytest.approx(parts)


def sharded_step() -> GraphModule:
    def step(x, weight):
        whole = unshard(weight, group="fsdp", num_ranks=8)
        return x @ whole.view(8192, 8192)

    weight = torch.empty(1024 * 8192, dtype=torch.bfloat16)
    return capture(step, torch.empty(8192, 8192, dtype=torch.bfloat16), weight)


def h100() -> CostModel:
    return CostModel(ranks_of_group=lambda name: range(8))


def test_the_table_says_that_nothing_was_measured():
    assert_expected_inline(
        simulate_step(sharded_step(), h100()).table(),
        """\
Simulated on H100 SXM (no clock was read)
  step                    1.93 ms
  compute stream busy     1.53 ms
    slowed by collectives 0.00 ms
  exposed communication   0.34 ms
  waiting for the host    0.07 ms
  peak memory (graph)     0.39 GiB estimated
  collectives                count      GiB        time     exposed
    FSDP unshard                 1     0.12     0.35 ms     0.34 ms""",
    )


def product_beside_a_gathering() -> GraphModule:
    def step(x, shard):
        launched = gather(shard)
        return x @ x, wait(launched)

    shard = torch.empty(2**26, dtype=torch.uint8)
    return capture(step, torch.empty(8192, 8192, dtype=torch.bfloat16), shard)


def test_a_product_beside_a_gathering_lacks_its_multiprocessors():
    """The gathering ends first. Until then 16 of 132 are away, and what they had done is left."""
    model = CostModel(ranks_of_group=lambda name: range(8), host="cuda_graph")
    found = simulate_step(product_beside_a_gathering(), model)
    (gathering,) = found.collectives
    product_us = found.compute_us - found.slowed_us
    assert gathering.duration_us < product_us
    assert found.slowed_us == pytest.approx(gathering.duration_us * 16 / 132, rel=0.01)
    assert found.step_us == pytest.approx(product_us + found.slowed_us)
    (drawn,) = [each for each in trace_events(found.run.timeline) if each["name"] == "mm"]
    assert drawn["dur"] == pytest.approx(found.step_us)


def test_a_machine_whose_collectives_take_nothing_slows_nothing():
    nothing = {"collective_sms": 0, "collective_memory_passes": 0.0}
    copying = CostModel(
        replace(h100_sxm(), **nothing), ranks_of_group=lambda name: range(8), host="cuda_graph"
    )
    assert simulate_step(product_beside_a_gathering(), copying).slowed_us == 0


def test_memory_is_estimated_with_the_sizes_of_data():
    graph = capture_exchange(rows=2**16, width=2**10)
    sizes = SymbolSizes(balanced_exchange_sizes(graph))
    cost_model = CostModel(sizes=sizes, ranks_of_group=lambda name: range(4))
    memory = simulate_step(graph, cost_model, num_static_inputs=1).memory
    assert memory.num_unsized == 0
    assert memory.peak_bytes >= 3 * 4 * 2**26
    assert memory.bytes_by_kind["static inputs"] == 4 * 2**26


def test_the_sensitivity_line_names_every_group_of_constants():
    found = step_sensitivity(sharded_step(), h100())
    assert [r.group for r in found.ranges] == ["compute", "memory", "network", "latency", "all"]
    assert all(r.faster_us <= found.time_us <= r.slower_us for r in found.ranges)
    assert found.ranges[-1].faster_us < found.time_us < found.ranges[-1].slower_us
    assert "simulated; with ±30% of compute" in str(found)


def test_sensitivity_includes_what_follows_the_graph():
    alone = step_sensitivity(sharded_step(), h100())
    longer = step_sensitivity(sharded_step(), h100(), extra_us=lambda hardware: 100.0)
    assert longer.time_us == pytest.approx(alone.time_us + 100)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.3])
def test_refuses_a_fraction_that_leaves_no_machine(fraction):
    with pytest.raises(ValueError, match="allowed: between 0 and 1"):
        step_sensitivity(sharded_step(), h100(), fraction=fraction)


def test_the_trace_is_a_file_that_perfetto_opens(tmp_path):
    graph_module = sharded_step()
    mm = torch.ops.aten.mm.default
    for product in graph_module.graph.find_nodes(op="call_function", target=mm):
        chunk = ChunkAnnotation(
            region_root="moe", role="body", chunk_id=1, direction="forward", producer="graph"
        )
        write_annotation(product, chunk)
    simulation = simulate_step(graph_module, h100())
    path = tmp_path / "traces" / "step.json"
    write_perfetto_trace(simulation, path)
    document = json.loads(path.read_text())
    assert document["otherData"] == {"simulated": True, "hardware": "H100 SXM"}
    threads = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["group fsdp (simulated)", "compute (simulated)"]
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["all_gather_into_tensor", "mm"]
    gathering, product = events
    assert gathering["ts"] + gathering["dur"] <= product["ts"]
    assert product["args"]["flops"] == 2 * 8192**3
    assert (gathering["args"]["chunk"], product["args"]["chunk"]) == (None, 1)
