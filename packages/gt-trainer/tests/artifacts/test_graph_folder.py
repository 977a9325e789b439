"""What lies in a folder of graphs is used, refused, or set aside with a message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from artifacts.ranks_as_threads import NumberGraph
from torchtitan.tools.logging import logger

from gt_config import Fingerprint
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trainer.artifacts.graph_folder import GraphFolder, Loaded, OwnGraphs, at_places

IDENTITY = Fingerprint(fields={"model": "one"})
AT = {"tp": 1}
GRAPH = NumberGraph(rank=0, coordinates=AT, numbers_of=lambda at: [1])


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """torchtitan's logger passes nothing on."""
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


@pytest.fixture
def folder(tmp_path: Path) -> GraphFolder:
    tmp_path.chmod(0o755)
    return GraphFolder(ArtifactFolder(tmp_path, max_bytes=None), axes=MeshAxes(coordinates=AT))


def test_a_graph_is_found_under_its_fingerprint_alone(folder: GraphFolder):
    assert folder.find(IDENTITY, GRAPH) is None
    folder.write_graph(IDENTITY, GRAPH.kind, GRAPH.encode([1, 2]))
    found = folder.find(IDENTITY, GRAPH)
    assert isinstance(found, Loaded)
    assert found.captured == [1, 2]
    assert folder.find(Fingerprint(fields={"model": "two"}), GRAPH) is None


def test_a_graph_says_from_which_axes_numbers_follow(folder: GraphFolder):
    folder.write_graph(IDENTITY, GRAPH.kind, replace(GRAPH.encode([1]), rule_axes=("tp",)))
    found = folder.find(IDENTITY, GRAPH)
    assert isinstance(found, Loaded)
    assert found.rule_axes == ("tp",)


def test_a_graph_that_names_no_axis_of_the_run_is_set_aside(
    folder: GraphFolder, caplog: pytest.LogCaptureFixture
):
    folder.write_graph(IDENTITY, GRAPH.kind, replace(GRAPH.encode([1]), rule_axes=("fsdp",)))
    assert folder.find(IDENTITY, GRAPH) is None
    assert "a graph names axes among tp, from which numbers follow, and not ['fsdp']" in caplog.text


def test_a_note_that_ranks_have_graphs_of_their_own_has_a_reason(folder: GraphFolder):
    note = OwnGraphs(reason="1 and 4")
    folder.write_own_graphs(IDENTITY, note)
    assert folder.find(IDENTITY, GRAPH) == note
    own = at_places(IDENTITY, ("tp",), AT)
    assert own.fields['place["tp"]'] == "1"
    assert own.digest != IDENTITY.digest
    assert at_places(own, ("tp",), AT) == own


def test_a_note_without_a_reason_is_set_aside(
    folder: GraphFolder, caplog: pytest.LogCaptureFixture
):
    folder.write_own_graphs(IDENTITY, OwnGraphs(reason=None))  # type: ignore[arg-type]  # as others may write
    assert folder.find(IDENTITY, GRAPH) is None
    assert "a note that ranks share no graph holds a reason" in caplog.text
    assert folder.find(IDENTITY, GRAPH) is None  # it is gone


def test_products_of_a_compiler_come_back_in_order(folder: GraphFolder):
    assert folder.find_products(IDENTITY) is None
    folder.write_products(IDENTITY, [b"first", b"second"])
    assert folder.find_products(IDENTITY) == (b"first", b"second")


@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "its folder", "the folder"])
@pytest.mark.parametrize("name", ["products", "own_graphs"])
def test_what_others_may_have_written_is_not_used(
    name: str, level: int, folder: GraphFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder.write_products(IDENTITY, [b"code"])
    folder.write_own_graphs(IDENTITY, OwnGraphs(reason="why"))
    assert folder.find(IDENTITY, GRAPH) is not None
    path = tmp_path / IDENTITY.digest / name
    (path, *path.parents)[level].chmod(0o777)
    found = folder.find_products(IDENTITY) if name == "products" else folder.find(IDENTITY, GRAPH)
    assert found is None
    assert f"{path} is not used, since others may write to" in caplog.text
    assert path.exists()


def test_what_is_stored_is_writable_by_its_owner_alone(tmp_path: Path):
    previous = os.umask(0)
    try:
        folder = GraphFolder(
            ArtifactFolder(tmp_path / "new" / "folder", max_bytes=None), axes=MeshAxes()
        )
        folder.write_products(IDENTITY, [b"code"])
    finally:
        os.umask(previous)
    assert folder.find_products(IDENTITY) == (b"code",)


def test_damaged_products_are_set_aside(
    folder: GraphFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder.write_products(IDENTITY, [b"code"])
    path = tmp_path / IDENTITY.digest / "products"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert folder.find_products(IDENTITY) is None
    assert "cannot be used" in caplog.text
    assert not path.exists()
