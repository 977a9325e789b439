"""Few ranks capture, all have the graph that they would have captured, and a failure ends all."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artifacts.ranks_as_threads import SECONDS, Coordinates, Start, start
from torchtitan.tools.logging import logger

from gt_trace.artifacts.folder import ArtifactFolder
from gt_trainer.artifacts.rank_exchange import CaptureFailedElsewhereError

MESH = [{"fsdp": fsdp, "tp": tp} for fsdp in range(2) for tp in range(4)]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """torchtitan's logger passes nothing on."""
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logger.name)
    yield
    logger.removeHandler(caplog.handler)


def like(at: Coordinates) -> list[Any]:
    return [1, 2, 3]


def by_tp(at: Coordinates) -> list[Any]:
    return [7, 256 * at["tp"]]


def squared(at: Coordinates) -> list[Any]:
    return [at["tp"] ** 2, at["fsdp"]]


def shared_folder(path: Path) -> Any:
    folder = ArtifactFolder(path, max_bytes=None)
    return lambda rank: folder


def own_folders(path: Path) -> Any:
    return lambda rank: ArtifactFolder(path / str(rank), max_bytes=None)


def check(found: Start, numbers_of: Any) -> None:
    """Every rank has what it would have captured."""
    for at, shared in zip(MESH, found.shared, strict=True):
        if isinstance(shared, Exception):
            raise shared
        assert shared.captured == numbers_of(at)


@pytest.mark.parametrize("folders", [shared_folder, own_folders])
def test_alike_ranks_have_the_graph_of_the_lowest(folders: Any, tmp_path: Path):
    found = start(MESH, like, folder_of=folders(tmp_path))
    check(found, like)
    assert found.captures == [0, 1, 4, 7]
    assert found.num_broadcasts == (folders is own_folders)
    (group,) = found.shared[3].groups
    assert str(group) == "ranks 0-7: captured by 0, compared with ranks 1-7 by 3"
    assert all(each.groups == (group,) for each in found.shared)


@pytest.mark.parametrize("folders", [shared_folder, own_folders])
@pytest.mark.parametrize("numbers_of", [like, by_tp, squared])
def test_a_later_start_captures_nothing(folders: Any, numbers_of: Any, tmp_path: Path):
    start(MESH, numbers_of, folder_of=folders(tmp_path))
    again = start(MESH, numbers_of, folder_of=folders(tmp_path))
    check(again, numbers_of)
    assert again.captures == []
    assert all(each.loaded_from is not None for each in again.shared)


@pytest.mark.parametrize(
    ("numbers_of", "cold", "warm"),
    [
        # Ranks 0, 1, 4 and 7 have captured.
        pytest.param(like, [2], [0], id="one graph"),
        # One rank for each place on "tp", of those that did not capture.
        pytest.param(by_tp, None, [0, 1, 2, 3], id="numbers by a place"),
    ],
)
def test_the_lowest_of_those_that_run_the_very_same_graph_verifies_it(
    numbers_of: Any, cold: list[int] | None, warm: list[int], tmp_path: Path
):
    first = start(MESH, numbers_of, folder_of=shared_folder(tmp_path))
    loaded = [rank for rank, each in enumerate(first.shared) if rank not in first.captures]
    of_place = {MESH[rank]["tp"]: rank for rank in reversed(loaded)}
    assert first.verifications == (sorted(of_place.values()) if cold is None else cold)
    assert start(MESH, numbers_of, folder_of=shared_folder(tmp_path)).verifications == warm


@pytest.mark.parametrize(
    ("is_sound", "captures"),
    [
        pytest.param(lambda numbers: False, list(range(8)), id="for all"),
        pytest.param(lambda numbers: numbers[1] != 256, [1, 5], id="for ranks at one place"),
    ],
)
def test_what_one_rank_finds_unsound_no_rank_that_runs_it_uses(
    is_sound: Any, captures: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    start(MESH, by_tp, folder_of=shared_folder(tmp_path))
    again = start(MESH, by_tp, folder_of=shared_folder(tmp_path), is_sound=is_sound)
    check(again, by_tp)
    assert again.captures == captures
    assert (
        "cannot be used by this rank, which captures: the numbers [7, 256] contradict each other"
        in caplog.text
    )


def test_numbers_that_follow_a_place_become_values_by_coordinate(tmp_path: Path):
    found = start(MESH, by_tp, folder_of=shared_folder(tmp_path))
    check(found, by_tp)
    assert len(found.captures) < len(MESH)
    (group,) = found.shared[0].groups
    assert group.num_rules == 1
    assert group.rule_axes == ("tp",)


@pytest.mark.parametrize(
    ("numbers_of", "first"),
    [(like, [0]), (by_tp, [0, 1, 2, 3]), (squared, [0, 1, 2, 3, 4, 5, 6, 7])],
)
def test_what_is_made_of_a_graph_is_stored_by_the_first_rank_that_runs_it(
    numbers_of: Any, first: list[int], tmp_path: Path
):
    for _ in ("captured", "loaded"):
        found = start(MESH, numbers_of, folder_of=shared_folder(tmp_path))
        assert [n for n, each in enumerate(found.shared) if each.is_first_of_its_kind] == first


def test_ranks_along_a_pipeline_run_graphs_of_other_names(tmp_path: Path):
    mesh = [{"pp": pp, "fsdp": fsdp} for pp in range(2) for fsdp in range(2)]
    found = start(mesh, like, folder_of=shared_folder(tmp_path))
    assert found.captures == [0, 3]
    assert [n for n, each in enumerate(found.shared) if each.is_first_of_its_kind] == [0, 2]


def test_numbers_that_follow_two_axes_become_values_by_both(tmp_path: Path):
    def by_both(at: Coordinates) -> list[Any]:
        return [5 + 64 * at["fsdp"] + 8 * at["tp"]]

    found = start(MESH, by_both, folder_of=shared_folder(tmp_path))
    check(found, by_both)
    (group,) = found.shared[0].groups
    assert (group.num_rules, group.rule_axes) == (1, ("fsdp", "tp"))
    assert len(found.captures) < len(MESH)


@pytest.mark.parametrize("folders", [shared_folder, own_folders])
def test_ranks_that_differ_otherwise_capture_and_store_their_own(folders: Any, tmp_path: Path):
    found = start(MESH, squared, folder_of=folders(tmp_path))
    check(found, squared)
    assert found.captures == list(range(8))
    (group,) = found.shared[5].groups
    assert str(group) == (
        "ranks 0-7: each has its own graph, captured by ranks 0-7; "
        "apart because nodes/0/3/0: 0 and 1"
    )
    assert len({each.identity.digest for each in found.shared}) == 8
    (again,) = start(MESH, squared, folder_of=folders(tmp_path)).shared[5].groups
    assert str(again) == (
        "ranks 0-7: each has its own graph, captured before; apart because nodes/0/3/0: 0 and 1"
    )


def test_ranks_of_a_mesh_without_tensor_parallelism_differ_in_no_number(tmp_path: Path):
    mesh = [{"fsdp": fsdp} for fsdp in range(4)]
    folder_of = shared_folder(tmp_path)
    found = start(mesh, lambda at: [at["fsdp"]], folder_of=folder_of)
    # A straight line goes through any two numbers, and proves nothing.
    assert found.captures == [0, 1, 2, 3]
    assert [each.captured for each in found.shared] == [[0], [1], [2], [3]]
    placed = start(
        mesh, lambda at: [at["fsdp"]], folder_of=shared_folder(tmp_path / "2"), is_placed=True
    )
    assert placed.captures == [0, 1, 3]
    assert [each.captured for each in placed.shared] == [[0], [1], [2], [3]]


def test_one_rank_whose_own_graph_is_gone_captures_it_again(tmp_path: Path):
    folder_of = shared_folder(tmp_path)
    found = start(MESH, squared, folder_of=folder_of)
    gone = found.shared[3].identity.digest
    (entry,) = [each for each in folder_of(0).entries() if each.digest == gone]
    entry.path.unlink()
    again = start(MESH, squared, folder_of=folder_of)
    check(again, squared)
    assert again.captures == [3]
    assert start(MESH, squared, folder_of=folder_of).captures == []


def test_a_rank_that_does_not_see_the_note_goes_by_what_others_see(tmp_path: Path):
    start(MESH, squared, folder_of=shared_folder(tmp_path / "seen"))
    seen, unseen = shared_folder(tmp_path / "seen"), shared_folder(tmp_path / "unseen")
    found = start(MESH, squared, folder_of=lambda rank: (seen if rank != 5 else unseen)(rank))
    check(found, squared)
    assert found.captures == [5]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_capture_its_own_graph_ends_all(rank: int, tmp_path: Path):
    found = start(MESH, squared, folder_of=shared_folder(tmp_path), fails_on=rank)
    for number, error in enumerate(found.shared):
        kind = ZeroDivisionError if number == rank else CaptureFailedElsewhereError
        assert isinstance(error, kind)


def test_ranks_that_know_how_they_differ_are_groups_from_the_start(tmp_path: Path):
    def identity_of(at: Coordinates) -> dict[str, str]:
        return {"model": "one", "rows": "8" if at["fsdp"] == 0 else "7"}

    found = start(MESH, like, folder_of=shared_folder(tmp_path), identity_of=identity_of)
    check(found, like)
    assert found.captures == [0, 1, 3, 4, 5, 7]
    first, second = found.shared[0].groups
    assert first.reason == ""
    assert second.reason == "other ranks have another rows"


def test_a_rank_that_does_not_see_the_folder_has_the_graph_from_one_that_does(tmp_path: Path):
    start(MESH, by_tp, folder_of=shared_folder(tmp_path / "seen"))
    seen, unseen = shared_folder(tmp_path / "seen"), shared_folder(tmp_path / "unseen")
    found = start(MESH, by_tp, folder_of=lambda rank: (seen if rank != 5 else unseen)(rank))
    check(found, by_tp)
    assert found.captures == []
    assert found.num_broadcasts == 1
    assert start(MESH[5:6], by_tp, folder_of=unseen).captures == []


@pytest.mark.parametrize("rank", [0, 7])
def test_a_capture_that_fails_ends_all_ranks(rank: int, tmp_path: Path):
    found = start(MESH, like, folder_of=shared_folder(tmp_path), fails_on=rank)
    for number, error in enumerate(found.shared):
        if number == rank:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert isinstance(error, CaptureFailedElsewhereError)
            assert str(error) == (
                f"rank {rank} could not capture its graph: ZeroDivisionError: no capture here"
            )


@pytest.mark.parametrize("folders", [shared_folder, own_folders])
def test_a_rank_that_refuses_what_others_load_captures_for_itself(
    folders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    start(MESH, like, folder_of=folders(tmp_path))
    found = start(MESH, like, folder_of=folders(tmp_path), refuses_on=5)
    check(found, like)
    assert found.captures == [5]
    assert "this rank, which captures: a value is missing here" in caplog.text


@pytest.mark.parametrize("folders", [shared_folder, own_folders])
def test_a_rank_that_refuses_what_others_load_and_cannot_capture_ends_all(
    folders: Any, tmp_path: Path
):
    start(MESH, like, folder_of=folders(tmp_path))
    begin = time.monotonic()
    found = start(MESH, like, folder_of=folders(tmp_path), refuses_on=5, fails_on=5)
    assert time.monotonic() - begin < SECONDS  # or threads would have waited in vain
    for number, error in enumerate(found.shared):
        if number == 5:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert isinstance(error, CaptureFailedElsewhereError)
            assert "rank 5 could not capture its graph: ZeroDivisionError" in str(error)


def test_what_cannot_be_stored_is_captured_by_every_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    found = start(MESH, by_tp, folder_of=shared_folder(tmp_path), is_storable=False)
    check(found, by_tp)
    assert sorted(found.captures) == list(range(8))
    assert "this graph cannot be stored: the operator mine::own is not in the list" in caplog.text
    assert str(found.shared[0].groups[0]) == (
        "ranks 0-7: each has its own graph, captured by ranks 0-7"
    )
    assert list(shared_folder(tmp_path)(0).entries()) == []


def test_a_damaged_graph_is_set_aside_and_captured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder_of = shared_folder(tmp_path)
    start(MESH, like, folder_of=folder_of)
    (entry,) = folder_of(0).entries()
    entry.path.write_bytes(entry.path.read_bytes()[:-3])
    found = start(MESH, like, folder_of=folder_of)
    check(found, like)
    assert found.captures == [0, 1, 4, 7]
    assert "cannot be used, and is captured anew" in caplog.text
    assert len(list((tmp_path / "damaged").iterdir())) >= 2
    assert start(MESH, like, folder_of=folder_of).captures == []


def test_a_graph_of_another_run_under_this_digest_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder_of = shared_folder(tmp_path)
    start(MESH, like, folder_of=folder_of, identity_of=lambda at: {"model": "one", "rows": "8"})
    (theirs,) = folder_of(0).entries()
    start(MESH, like, folder_of=folder_of)
    (ours,) = [each for each in folder_of(0).entries() if each.digest != theirs.digest]
    ours.path.write_bytes(theirs.path.read_bytes())
    found = start(MESH, like, folder_of=folder_of)
    check(found, like)
    assert found.captures == [0, 1, 4, 7]
    assert "it lies under the digest of another run" in caplog.text
    assert "rows" in caplog.text


def test_a_folder_that_cannot_be_written_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    found = start(MESH, by_tp, folder_of=shared_folder(tmp_path / "file"))
    check(found, by_tp)
    assert len(found.captures) < len(MESH)  # the others have it all the same
    assert "--compile.artifacts: not stored:" in caplog.text
