"""The recorder on a GPU, where there is one."""

from __future__ import annotations

import gc

import pytest
import torch
from pass_graphs import capture, run_pass
from torch.fx import GraphModule

from gt_passes import CudaGraphs, release_cuda_graphs
from gt_passes.analysis.host_copies import OFFLOAD
from gt_passes.cuda_graphs.cuda_graph_replay import ReplayedPiece, ReplaySession
from gt_passes.cuda_graphs.cuda_graphs import CudaRecorder
from gt_passes.cuda_graphs.piece_memory import PieceMemory, Place

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_pieces_replay_what_they_compute():
    session = ReplaySession(recorder=CudaRecorder())
    x_moves = PieceMemory(
        shared_inputs=((0, Place.of(torch.empty(64, 64))),), own_inputs=(), rooms=()
    )
    nothing_moves = PieceMemory(shared_inputs=(), own_inputs=(), rooms=())
    first = ReplayedPiece(lambda x, w: (x @ w,), session, memory=x_moves, input_names=["x", "w"])
    second = ReplayedPiece(
        lambda y, w: ((y @ w).relu(),), session, memory=nothing_moves, input_names=["y", "w"]
    )
    w = torch.randn(64, 64, device="cuda")
    for number in range(6):
        if number == 4:
            w = w.clone()  # as a checkpoint that replaces a parameter
        x = torch.randn(64, 64, device="cuda")
        (result,) = second(*first(x, w), w)
        assert torch.equal(result, (x @ w @ w).relu())
    assert session.num_recordings == 2


def recorded(step, *inputs: torch.Tensor) -> tuple[GraphModule, dict[str, int]]:
    graph_module = capture(step, *inputs)
    report = run_pass(CudaGraphs(min_kernels=2), graph_module)
    return graph_module, dict(report.counts)


def test_copies_to_host_memory_are_replayed():
    """The stream of the copies forks from the one that records, and joins it again."""

    def step(x):
        y = x.sin()
        host = torch.ops.gt_passes.wait_copy(OFFLOAD(y), y)
        z = (x * 2).cos()
        back = torch.ops.gt_passes.reload(host, x.device)
        return torch.ops.gt_passes.wait_copy(back, host) * z.exp()

    x = torch.randn(1 << 20, device="cuda")
    graph_module, counts = recorded(step, x)
    assert counts["pieces"] == 1
    assert counts["host_bytes"] == x.numel() * 4
    for number in range(6):
        assert torch.equal(graph_module(x + number), step(x + number))


@pytest.fixture
def unused_memory():
    """Nothing is kept from other tests."""
    gc.collect()
    torch.cuda.empty_cache()


def test_results_that_nobody_reads_any_more_give_their_memory_to_later_pieces(unused_memory):
    def reserved_bytes(num_pieces: int) -> int:
        """What recordings of so many pieces take, x and the results of one step included."""

        def step(x, count):
            for _ in range(num_pieces):
                x = x.sin().cos()
                count.item()
            return x

        before = torch.cuda.memory_reserved()
        x, count = torch.randn(1 << 22, device="cuda"), torch.ones((), device="cuda")
        graph_module, counts = recorded(step, x, count)
        assert counts["pieces"] == num_pieces
        assert counts["bytes_between_pieces"] == 2 * x.numel() * 4
        for _ in range(2):
            graph_module(x, count)
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved() - before
        for number in range(4):
            assert torch.equal(graph_module(x + number, count), step(x + number, count))
        release_cuda_graphs(graph_module)
        return reserved

    few = reserved_bytes(4)
    gc.collect()
    torch.cuda.empty_cache()
    assert reserved_bytes(16) == few
