from __future__ import annotations

from pathlib import Path

import pytest
import torch
from step_cases import run, tied
from torch import nn

from gt_config.errors import StaleFingerprintError
from gt_trace import load, save, trace_step
from gt_trace.errors import ArtifactDamagedError, ArtifactError


def test_a_saved_step_is_loaded_for_its_module_and_runs(tmp_path: Path) -> None:
    case = tied()
    save(case.step, tmp_path / "step")

    step = load(tmp_path / "step", case.module)

    assert torch.equal(run(case, step)[0], run(case, case.step)[0])


def test_a_step_without_a_module_is_loaded_without_one(tmp_path: Path) -> None:
    save(trace_step(lambda x: x * 2)(torch.ones(3)), tmp_path / "step")

    assert load(tmp_path / "step").bind()(torch.ones(3)).tolist() == [2, 2, 2]


def test_another_module_is_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    model = nn.Linear(4, 2, bias=False)
    save(trace_step(lambda x: model(x).sum(), module=model)(torch.ones(3, 4)), tmp_path / "step")

    with pytest.raises(StaleFingerprintError) as refused:
        load(tmp_path / "step", nn.Linear(4, 3, bias=False))

    assert [each.path for each in refused.value.differences] == [
        'state["weight"]["plain tensors"][0]'
    ]
    assert "[2, 4]" in str(refused.value)
    assert "[3, 4]" in str(refused.value)


def test_what_the_caller_says_of_a_step_is_part_of_its_identity(tmp_path: Path) -> None:
    case = tied()
    save(case.step, tmp_path / "step", identity={"activation": "relu"})
    load(tmp_path / "step", case.module, identity={"activation": "relu"})

    with pytest.raises(StaleFingerprintError, match=r'activation.*"relu".*"gelu"'):
        load(tmp_path / "step", case.module, identity={"activation": "gelu"})


@pytest.mark.parametrize(
    "num_damages", [100, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_damaged_files_are_refused(tmp_path: Path, num_damages: int) -> None:
    """Bits are flipped, the end is cut off, and pieces change places."""
    path, case = tmp_path / "step", tied()
    save(case.step, path)
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
            load(path, case.module)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(b"")

    with pytest.raises(ArtifactDamagedError):
        load(tmp_path / "step")
