"""What ranks tell each other, where there is nobody to ask or who is not to be asked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gt_trainer.artifacts.rank_exchange import ALONE, RankExchange


def test_a_rank_that_is_alone_asks_nobody_though_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def ask(*args: object) -> None:
        asked.append("others")
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_gather_into_tensor", ask)

    assert ALONE.gather({"identity": "x"}) == [{"identity": "x"}]
    assert ALONE.broadcast(b"graph", source=0) == b"graph"
    ALONE.all_succeeded(None, what="could not capture its graph")
    assert (asked, ALONE.rank) == ([], 0)

    with pytest.raises(ConnectionError):
        RankExchange(device=torch.device("cpu")).gather(None)
    assert asked == ["others"]
