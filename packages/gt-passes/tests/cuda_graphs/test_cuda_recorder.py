"""The recorder on a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch

from gt_passes.cuda_graphs.cuda_graph_replay import ReplayedPiece, ReplaySession
from gt_passes.cuda_graphs.cuda_recorder import CudaRecorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_pieces_replay_what_they_compute():
    session = ReplaySession(recorder=CudaRecorder())
    first = ReplayedPiece(
        lambda x, w: (x @ w,), session, input_names=["x", "w"], static_inputs=frozenset({1})
    )
    second = ReplayedPiece(
        lambda y, w: ((y @ w).relu(),),
        session,
        input_names=["y", "w"],
        static_inputs=frozenset({0, 1}),
    )
    w = torch.randn(64, 64, device="cuda")
    for number in range(6):
        if number == 4:
            w = w.clone()  # as a checkpoint that replaces a parameter
        x = torch.randn(64, 64, device="cuda")
        (result,) = second(*first(x, w), w)
        assert torch.equal(result, (x @ w @ w).relu())
    assert session.num_recordings == 2
