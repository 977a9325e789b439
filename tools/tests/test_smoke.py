import sys
from pathlib import Path

import pytest

import smoke


def check(room: Path, source: str, *, seconds: float, before: tuple[str, ...] = ()) -> None:
    """Holds the import of a module with this source to a limit."""
    (room / "imported.py").write_text(source)
    limit = smoke.ImportLimit(module="imported", before=before, seconds=seconds)
    smoke._check_import(sys.executable, limit, room=room)


@pytest.fixture(autouse=True)
def one_start(monkeypatch):
    monkeypatch.setattr(smoke, "_STARTS", 1)


def test_an_import_that_prints_is_timed(tmp_path, capsys):
    check(tmp_path, "print('welcome')", seconds=60, before=("json", "re"))
    assert capsys.readouterr().out.startswith("import imported after json after re: ")


def test_a_slow_import_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "_run", lambda *_, **__: "0.25\n")
    with pytest.raises(
        smoke.SlowImportError,
        match=r"^importing imported after json takes 250 ms of processor time, and 100 are allowed$",
    ):
        check(tmp_path, "", seconds=0.1, before=("json",))


@pytest.mark.parametrize(("output", "shown"), [("0.25\nbye\n", "'bye'"), ("", "''")])
def test_an_import_time_that_cannot_be_read_is_told(tmp_path, monkeypatch, output, shown):
    monkeypatch.setattr(smoke, "_run", lambda *_, **__: output)
    with pytest.raises(
        smoke.UnreadableImportTimeError,
        match=f"^importing imported should end with its processor seconds, and ends with {shown}$",
    ):
        check(tmp_path, "", seconds=0.1)


@pytest.mark.parametrize("error", [smoke.SlowImportError, smoke.UnreadableImportTimeError])
def test_the_other_installations_are_tested_after_a_failure(monkeypatch, capsys, tmp_path, error):
    tested = []

    def fail(workspace, variant, **_):
        tested.append(str(variant))
        raise error("why")

    monkeypatch.setattr(smoke, "smoke_test", fail)
    monkeypatch.setattr(sys, "argv", ["smoke", "gt-config", "gt-trace", "--uv", sys.executable])
    assert smoke.main() == 1
    assert len(tested) >= 2
    assert "smoke: gt-config FAILED: why" in capsys.readouterr().err
