"""When pieces are run, recorded and replayed, and what happens when tensors move."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from gt_passes.cuda_graphs.cuda_graph_replay import ReplayedPiece, ReplaySession
from gt_passes.cuda_graphs.piece_memory import PieceMemory, Place
from gt_passes.errors import CudaGraphAddressError
from gt_passes.testing import FakeRecorder


def two_pieces(**options):
    """x -> x @ w -> (x @ w) @ w, in two pieces that share a static weight."""
    session = ReplaySession(recorder=FakeRecorder(), **options)
    copy_of_x = PieceMemory(
        shared_inputs=((0, Place.of(torch.empty(2, 3))),), own_inputs=(), rooms=()
    )
    nothing = PieceMemory(shared_inputs=(), own_inputs=(), rooms=())
    first = ReplayedPiece(lambda x, w: (x @ w,), session, memory=copy_of_x, input_names=["x", "w"])
    second = ReplayedPiece(lambda y, w: (y @ w,), session, memory=nothing, input_names=["y", "w"])

    def step(x, w):
        (y,) = first(x, w)
        return second(y, w)[0].clone()

    return session, step


def test_runs_then_records_then_replays():
    session, step = two_pieces(num_warmup_steps=2)
    w = torch.randn(3, 3)
    modes = []
    for _ in range(5):
        x = torch.randn(2, 3)
        assert torch.equal(step(x, w), x @ w @ w)
        modes.append(session.mode)
    assert modes == ["run", "run", "record", "replay", "replay"]
    assert session.recorder.num_recorded == 2
    assert session.recorder.memory_bytes == 512  # for x; all else stays where it is


def test_values_written_to_static_inputs_are_seen():
    _, step = two_pieces()
    w, x = torch.randn(3, 3), torch.randn(2, 3)
    for _ in range(4):
        w.add_(1)
        assert torch.equal(step(x, w), x @ w @ w)


def test_a_replaced_parameter_is_recorded_anew_with_all_pieces():
    session, step = two_pieces()
    x = torch.randn(2, 3)
    modes = []
    weights = [torch.randn(3, 3) for _ in range(2)]
    for number in (0, 0, 0, 1, 1, 1):
        assert torch.equal(step(x, weights[number]), x @ weights[number] @ weights[number])
        modes.append(session.mode)
    assert modes == ["run", "record", "replay", "run", "record", "replay"]
    assert session.num_recordings == 2
    assert session.recorder.num_recorded == 4
    assert session.recorder.num_resets == 2  # fresh memory each time


def test_parameters_that_keep_moving_are_an_error():
    _, step = two_pieces(max_recordings=2)
    x, weights = torch.randn(2, 3), [torch.randn(3, 3) for _ in range(8)]
    for number in (0, 0, 0, 1, 1, 1):
        step(x, weights[number])
    with pytest.raises(CudaGraphAddressError) as raised:
        step(x, weights[2])
    assert_expected_inline(
        str(raised.value),
        """w: the address has changed again, after 2 recordings. A CUDA graph reads parameters and buffers where they are: update them in place, or run without cuda-graphs""",
    )


def test_released_recordings_are_made_anew():
    session, step = two_pieces()
    w, x = torch.randn(3, 3), torch.randn(2, 3)
    for _ in range(3):
        step(x, w)
    session.release()
    assert torch.equal(step(x, w), x @ w @ w)
    assert session.mode == "record"
