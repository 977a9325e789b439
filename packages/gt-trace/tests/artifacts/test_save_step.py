from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from step_cases import run, tied
from torch import Tensor, nn
from torch.nn import functional

from gt_config.errors import StaleFingerprintError
from gt_trace import StateMismatchError, load, save, trace_step
from gt_trace.capture.python_holders import numbered
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


class _Settings:
    def __init__(self) -> None:
        self.scale, self.num_steps = 2.0, 0


def _shift(number: int) -> Callable[[Tensor], Tensor]:
    return [lambda x: x + 1, lambda x: x + 2][number]


class _Scaled(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.0)
        self.config, self.table = _Settings(), types.SimpleNamespace(scale=2.0)
        self.function: Callable[[Tensor], Tensor] = functional.gelu
        self.shift = _shift(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shift(self.dropout(self.function(self.linear(x))))
        x = x * getattr(self.config, f"sc{'ale'}") * getattr(self.config, "late", 1.0)
        return x * self.table.scale * self.factor


def _dropout(model: _Scaled) -> None:
    model.dropout.p = 0.5


def _scale(model: _Scaled) -> None:
    model.config.scale = 3.0


def _scale_is_gone(model: _Scaled) -> None:
    del model.config.scale


def _late(model: _Scaled) -> None:
    model.config.late = 3.0  # type: ignore[attr-defined]


def _table(model: _Scaled) -> None:
    model.table.scale = 3.0


def _function(model: _Scaled) -> None:
    model.function = functional.relu


def _lambda(model: _Scaled) -> None:
    model.shift = _shift(1)


_CHANGES = {
    _dropout: r"module\.dropout\.p is 0\.5, and was 0\.0",
    _scale: r"module\.config\.scale is 3\.0, and was 2\.0",
    _scale_is_gone: r"module\.config\.scale is gone, and was 2\.0",
    _late: r"module\.config\.late is 3\.0, and was missing",
    _table: r"module\.table\.scale is 3\.0, and was 2\.0",
    _lambda: r"module\.shift is .*_shift\..*, and was .*_shift\.",
    _function: r"module\.function is .*relu.*, and was .*gelu",
}


@pytest.mark.parametrize("change", _CHANGES)
def test_numbers_and_functions_of_the_module_are_those_of_the_file(
    tmp_path: Path, change: Callable[[_Scaled], None]
) -> None:
    model, x = _Scaled(), torch.ones(3, 4)
    save(trace_step(lambda x: model(x).sum().detach(), module=model)(x), tmp_path / "step")
    save(load(tmp_path / "step", model), tmp_path / "again")  # what was read from a file
    other = _Scaled()
    other.config.num_steps = 5  # is not read
    bound = load(tmp_path / "again", other).bind(other)
    assert torch.equal(bound(x), other(x).sum())
    change(other)

    with pytest.raises(StateMismatchError, match=_CHANGES[change]):
        bound(x)
    with pytest.raises(StateMismatchError, match=_CHANGES[change]):
        load(tmp_path / "again", other).bind(other)


class _Otherwise(_Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_model_of_another_class_is_refused(tmp_path: Path) -> None:
    model, x = _Scaled(), torch.ones(3, 4)
    step = trace_step(lambda x: model(x).sum().detach(), module=model)(x)
    save(step, tmp_path / "step")

    told = r"the class of module is '_Otherwise', and was '_Scaled'"
    with pytest.raises(StateMismatchError, match=told):
        step.bind(_Otherwise())
    with pytest.raises(StateMismatchError, match=told):
        load(tmp_path / "step", _Otherwise()).bind(_Otherwise())


def test_texts_of_a_frozenset_have_the_same_places_in_every_process() -> None:
    names = frozenset({"delta", "beta", "alpha", "gamma"})
    assert numbered(names) == {0: "alpha", 1: "beta", 2: "delta", 3: "gamma"}


def test_a_constant_of_the_class_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _Scaled()
    step = trace_step(lambda x: model(x).sum().detach(), module=model)(torch.ones(3, 4))
    save(step, tmp_path / "step")
    monkeypatch.setattr(_Scaled, "factor", 3.0)

    with pytest.raises(StateMismatchError, match=r"_Scaled\.factor is 3\.0, and was 2\.0"):
        load(tmp_path / "step", _Scaled()).bind(_Scaled())


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(b"")

    with pytest.raises(ArtifactDamagedError):
        load(tmp_path / "step")
