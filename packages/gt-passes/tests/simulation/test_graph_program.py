"""Regions in a graph: what is replayed costs the host one launch, and waits see across borders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import capture, collectives, run_pass
from recorded_step_cases import ON_CPU
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gt_passes import CudaGraphs
from gt_passes.analysis.outlined_region import OutlinedRegion, RegionOutliner
from gt_passes.simulation import CostModel, GraphProgram, StepSimulation, h100_sxm, simulate_step
from gt_passes.testing import FakeRecorder

H100 = h100_sxm()
X = torch.ones(2**10)
LARGE = torch.ones(2**24)  # so much that the host's launches do not hide it


def cost_model() -> CostModel:
    return CostModel(ranks_of_group=lambda name: range(8))


def outlined(graph_module: GraphModule, names: set[str]) -> GraphModule:
    """The graph with some of its nodes made a region that runs as it is."""
    nodes = [node for node in graph_module.graph.nodes if node.name in names]
    outliner = RegionOutliner(graph_module)
    outline = outliner.outline(nodes)
    body = outliner.body(outline)
    outliner.replace(outline, OutlinedRegion(body, body), stem="region")
    outliner.finish()
    return graph_module


def many_small_kernels(x: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        x = x.sin()
    return x


def test_a_replayed_piece_costs_the_host_one_launch():
    graph = capture(many_small_kernels, X)
    launched = simulate_step(graph, cost_model())
    assert launched.host_idle_us > 30 * (H100.host_kernel_us - H100.kernel_fixed_us - 1)
    run_pass(CudaGraphs(target=ON_CPU, new_recorder=FakeRecorder), graph)
    replayed = simulate_step(graph, cost_model())
    assert len(replayed.run.nodes) == len(launched.run.nodes) + 1  # what leaves a piece is copied
    assert replayed.step_us < launched.step_us / 2
    assert replayed.host_idle_us < 3 * (H100.host_kernel_us + H100.launch_latency_us)


def gathering_step(x: torch.Tensor) -> torch.Tensor:
    launched = collectives.all_gather_into_tensor(x.sin(), 8, "fsdp")
    return collectives.wait_tensor(launched) * 2


def test_a_wait_outside_sees_what_was_launched_inside():
    plain = capture(gathering_step, LARGE)
    expected = simulate_step(plain, cost_model()).exposed_us
    inside = outlined(capture(gathering_step, LARGE), {"sin", "all_gather_into_tensor"})
    assert simulate_step(inside, cost_model()).exposed_us == pytest.approx(expected) != 0


def test_a_wait_inside_sees_what_was_launched_outside():
    inside = outlined(capture(gathering_step, LARGE), {"wait_tensor", "mul"})
    expected = simulate_step(capture(gathering_step, LARGE), cost_model()).exposed_us
    assert simulate_step(inside, cost_model()).exposed_us == pytest.approx(expected) != 0


def test_prices_of_a_program_are_those_of_its_nodes():
    graph = capture(gathering_step, X)
    program = GraphProgram(graph, cost_model())
    for model in (cost_model(), cost_model().with_hardware(H100.scaled("compute", 0.5))):
        run = program.run(model)
        assert run.costs == tuple(map(model.cost, run.nodes))


def test_one_reading_serves_several_machines():
    graph = capture(gathering_step, X)
    program = GraphProgram(graph, cost_model())
    slow = cost_model().with_hardware(H100.scaled("latency", 0.5))
    first = program.run(cost_model()).timeline.makespan_us
    assert program.run(slow).timeline.makespan_us > first
    assert program.run(cost_model()).timeline.makespan_us == first


def reading(step: Callable[[torch.Tensor], object], device: str = "cpu") -> StepSimulation:
    """The step, which reads numbers, captured with tensors of that device and simulated."""

    def on_device() -> object:
        return step(torch.ones(64, dtype=torch.int64, device=device))

    with FakeTensorMode(shape_env=ShapeEnv()):
        return simulate_step(make_fx(on_device)(), cost_model())


def num_waits(simulation: StepSimulation) -> int:
    """How often the host waits for the device."""
    return sum(cost.blocks_host for cost in simulation.run.costs)


def numbers_of(*tensors: torch.Tensor) -> list[object]:
    """Each number of each, read one after another, as ``tolist`` does."""
    return [each.item() for tensor in tensors for each in tensor.unbind()]


def test_can_read_numbers_of_one_tensor_in_a_row_for_one_wait_where_it_was_captured_on_a_cpu():
    one = reading(lambda x: torch.ones(x.cumsum(0).unbind()[0].item()))
    all_64 = reading(lambda x: torch.ones(numbers_of(x.cumsum(0))[63]))
    assert (num_waits(one), num_waits(all_64)) == (1, 1)
    assert all_64.step_us - one.step_us == pytest.approx(63 * H100.host_scalar_us, rel=1e-4)
    assert one.host_idle_us > H100.host_sync_us


def test_can_read_numbers_of_a_copy_in_host_memory_for_no_further_wait():
    def copied(x: torch.Tensor) -> object:
        counts = x.to("cpu")
        return x.sin(), numbers_of(counts)

    assert num_waits(reading(copied, "cuda")) == 1


@pytest.mark.parametrize(
    ("step", "device", "num_waiting"),
    [
        (lambda x: numbers_of(x), "cuda", 64),
        (lambda x: numbers_of(x, x + 1), "cpu", 2),
        (lambda x: numbers_of(*x.sort()), "cpu", 2),
        (lambda x: (x[0].item(), x.sin(), x[1].item()), "cpu", 2),
        (lambda x: (x[0].item(), (x + 1)[0].item(), x[1].item()), "cpu", 3),
        (lambda x: numbers_of(x.to("cpu").cuda()), "cuda", 1 + 64),
    ],
    ids=[
        "on CUDA",
        "another tensor",
        "another result",
        "an operator between",
        "in turns",
        "copied back",
    ],
)
def test_cannot_read_further_numbers_for_no_wait(
    step: Callable[[torch.Tensor], object], device: str, num_waiting: int
):
    assert num_waits(reading(step, device)) == num_waiting
