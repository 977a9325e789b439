from __future__ import annotations

from pathlib import Path

import pytest
import torch
from step_cases import run, tied

from gt_config import Fingerprint
from gt_config.errors import StaleFingerprintError
from gt_trace import load, save
from gt_trace.errors import ArtifactDamagedError, ArtifactError

IDENTITY = Fingerprint(fields={"model": '"tied"', "torch": '"2.15.0"'})


def test_a_saved_step_is_loaded_and_runs(tmp_path: Path) -> None:
    case = tied()
    save(case.step, tmp_path / "step", fingerprint=IDENTITY)

    step = load(tmp_path / "step", fingerprint=IDENTITY)

    assert torch.equal(run(case, step)[0], run(case, case.step)[0])


def test_a_step_of_something_else_is_refused_with_the_field_that_differs(tmp_path: Path) -> None:
    save(tied().step, tmp_path / "step", fingerprint=IDENTITY)
    now = Fingerprint(fields={**IDENTITY.fields, "torch": '"2.16.0"'})

    with pytest.raises(StaleFingerprintError, match=r'torch.*"2.15.0".*"2.16.0"'):
        load(tmp_path / "step", fingerprint=now)


@pytest.mark.parametrize(
    "num_damages", [100, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_damaged_files_are_refused(tmp_path: Path, num_damages: int) -> None:
    """Bits are flipped, the end is cut off, and pieces change places."""
    path = tmp_path / "step"
    save(tied().step, path, fingerprint=IDENTITY)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    for number in range(num_damages):
        damaged = bytearray(whole)
        if number % 3 == 0:
            damaged[draw(len(whole))] ^= 1 << draw(8)
        elif number % 3 == 1:
            del damaged[draw(len(whole)) :]
        else:
            length = 1 + draw(40)
            one, other = sorted(draw(len(whole) - length) for _ in range(2))
            pieces = damaged[one : one + length], damaged[other : other + length]
            damaged[other : other + length], damaged[one : one + length] = pieces
        path.write_bytes(damaged)
        if damaged == whole:
            continue
        with pytest.raises((ArtifactError, StaleFingerprintError)):
            load(path, fingerprint=IDENTITY)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(b"")

    with pytest.raises(ArtifactDamagedError):
        load(tmp_path / "step", fingerprint=IDENTITY)
