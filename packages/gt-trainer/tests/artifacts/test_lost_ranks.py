"""Ranks that wait for each other's captures end soon, and say why, when one of them is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from artifacts.ranks_as_threads import NumberGraph

from gt_config import Fingerprint
from gt_config.errors import FingerprintTypeError
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trainer.artifacts.graph_folder import GraphFolder
from gt_trainer.artifacts.rank_exchange import (
    CaptureFailedElsewhereError,
    RankExchange,
    RankLostError,
)
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.artifacts.shared_capture import share_capture
from gt_trainer.launcher import run_in_child
from gt_trainer.launcher.child import ChildFailedError

TIMEOUT = 3
SOON = 60
"""Seconds, on a machine that does much else; the time limit of a process group is half an hour."""

Ended = tuple[str, str]
"""What a rank raised: class and text."""


def die() -> None:
    os._exit(9)


def stall() -> None:
    time.sleep(3 * TIMEOUT)


def two_ranks(obtain: Callable[[int, str], object], folder: Path) -> list[Ended | None]:
    """What each of two processes of one process group raised; None of one that died."""

    def run(rank: int) -> Ended | None:
        try:
            return run_in_child(partial(_raised, obtain, rank, str(folder)), timeout_seconds=SOON)
        except ChildFailedError as error:
            if "ended with status 9" not in str(error):
                raise
            return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def _raised(obtain: Callable[[int, str], object], rank: int, folder: str) -> Ended:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        obtain(rank, folder)
    except Exception as error:  # noqa: BLE001  # a test looks at it
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def shared(happens: Callable[[], None], in_capture_of: int, rank: int, folder: str) -> object:
    """Share a capture during which something happens on one rank."""

    def numbers_of(at: Any) -> list[Any]:
        if rank == in_capture_of:
            happens()
        return [1, 2]

    axes = MeshAxes(coordinates={"fsdp": rank})
    return share_capture(
        Fingerprint(fields={"model": "one"}),
        NumberGraph(rank=rank, coordinates={"fsdp": rank}, numbers_of=numbers_of),
        folder=GraphFolder(ArtifactFolder(Path(folder) / "graphs", max_bytes=None), axes=axes),
        axes=axes,
        exchange=RankExchange(device=torch.device("cpu")),
    )


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_while_it_captures_ends_the_one_that_waits(dying: int, tmp_path: Path):
    ended = two_ranks(partial(shared, die, dying), tmp_path)
    assert ended[dying] is None
    found = ended[1 - dying]
    assert found is not None
    name, text = found
    assert name == RankLostError.__name__
    assert text.startswith(
        "another rank has ended, or captured for longer than --comm.init_timeout_seconds, while "
        "ranks share captured graphs; its own log says why ("
    )
    assert list((tmp_path / "graphs").glob("*/graph")) == []


def test_a_rank_that_captures_for_too_long_ends_both(tmp_path: Path):
    for found in two_ranks(partial(shared, stall, 1), tmp_path):
        assert found is not None
        assert found[0] == RankLostError.__name__


def unknown_to_one(rank: int, folder: str) -> object:
    """Ask for a graph of which one rank cannot tell what it depends on."""

    def identity(graph: object) -> Fingerprint:
        if rank == 1:
            raise FingerprintTypeError("model.scale is of type Secret")
        return Fingerprint(fields={"model": "one"})

    run: Any = SimpleNamespace(identity=identity, device=torch.device("cpu"))
    nothing: Any = None
    return RunArtifacts.obtain(run, nothing, is_first=True)


def test_a_rank_that_cannot_tell_what_its_graph_depends_on_ends_all(tmp_path: Path):
    first, second = two_ranks(unknown_to_one, tmp_path)
    assert second == (FingerprintTypeError.__name__, "model.scale is of type Secret")
    assert first is not None
    assert first[0] == CaptureFailedElsewhereError.__name__
    assert first[1] == (
        "rank 1 could not tell what its graph depends on: FingerprintTypeError: model.scale is of "
        "type Secret"
    )
