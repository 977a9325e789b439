"""What a compiler made before saves a compilation; where it cannot be used, it costs one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gt_config import Fingerprint
from gt_passes.compilation.compiler_products import note_product
from gt_trace.artifacts.folder import ArtifactFolder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trainer.artifacts import run_artifacts
from gt_trainer.artifacts.run_artifacts import RunArtifacts
from gt_trainer.artifacts.shared_capture import SharedGraph

SHARED = SharedGraph(
    captured=None,
    identity=Fingerprint(fields={"model": "one"}),
    loaded_from=None,
    rule_axes=(),
    is_first_of_its_kind=True,
    groups=(),
)


@pytest.fixture
def artifacts(tmp_path: Path) -> RunArtifacts:
    return RunArtifacts(
        folder=ArtifactFolder(tmp_path, max_bytes=None),
        settings=cast("Any", None),
        parallel_dims=cast("Any", None),
        device=torch.device("cpu"),
    )


def generate(artifacts: RunArtifacts, product: bytes) -> None:
    with artifacts.generating_code(SHARED, MeshAxes.of([])):
        note_product(product)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), ValueError("sizes do not add up")],
    ids=["full disk", "damaged"],
)
def test_products_that_cannot_be_reused_cost_a_compilation_and_are_made_anew(
    error: Exception,
    artifacts: RunArtifacts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    given: list[bytes] = []

    def refuse(products: tuple[bytes, ...]) -> None:
        raise error

    def accept(products: tuple[bytes, ...]) -> None:
        given.append(products[0])

    generate(artifacts, b"first")
    monkeypatch.setattr(run_artifacts, "reuse_products", refuse)
    caplog.clear()
    generate(artifacts, b"second")
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warning == (
        "--compile.artifacts: what a compiler made before cannot be used by this rank, which "
        f"compiles: {error}"
    )
    monkeypatch.setattr(run_artifacts, "reuse_products", accept)
    generate(artifacts, b"third")
    assert given == [b"second"]
