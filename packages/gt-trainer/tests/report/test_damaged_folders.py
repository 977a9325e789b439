"""Reports of folders that somebody or a crash damaged: a page or a sentence, and no traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gt_trainer.command_line.cli import main
from gt_trainer.report.dump_folder import ReportError, read_run

WRITTEN = Path(__file__).parent / "written_run"
"""What ``gt-train --steps 4 --validator.enable`` wrote."""

NAMES = ("metrics.jsonl", "validation.jsonl", "starts.jsonl", "startup.json", "captures.json")
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**400, -(10**20), 1e308, "", "x", "NaN", "\ud800", [], {}, [[]]),
    *([None, None], {"a": None}, {"": {"": {}}}, [1, 2, 3], float("inf"), float("nan")),
)
TEXTS = (b"\xff\xfe", b"{", b"[" * 100_000, b"null", b"\n\n", b"1" * 5_000, b'{"step": 1}\n', b"")


def _places(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(item, dict | list):
        for key, each in item.items() if isinstance(item, dict) else enumerate(item):
            yield from _places(each, (*path, key))


def _damage(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice(NAMES)
    is_lines = path.suffix == ".jsonl"
    kind = draw.choice(("value", "value", "value", "key", "text", "bytes", "kind"))
    if kind == "text":
        path.write_bytes(draw.choice(TEXTS) + draw.choice((b"", b"\n")))
    elif kind == "bytes":
        content = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 20)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
    elif kind == "kind":
        path.unlink()
        draw.choice((Path.mkdir, os.mkfifo, lambda p: p.symlink_to("/dev/zero")))(path)
    else:
        text = path.read_text()
        found = [*map(json.loads, text.splitlines())] if is_lines else json.loads(text)
        *place, last = draw.choice([*_places(found)])
        holder = found
        for key in place:
            holder = holder[key]
        if kind == "value":
            holder[last] = draw.choice(JUNK)
        elif isinstance(holder, dict):
            holder["other"] = holder.pop(last)
        else:
            holder.append(holder.pop(0))
        lines = [json.dumps(each) + "\n" for each in found] if is_lines else [json.dumps(found)]
        path.write_text("".join(lines))
    return f"{kind} of {path.name}"


@pytest.mark.parametrize(
    "num_cases", [300, pytest.param(5_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_damaged_folder_is_a_page_or_one_sentence(
    num_cases: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    draw, refused = random.Random(0), 0
    for number in range(num_cases):
        folder = Path(shutil.copytree(WRITTEN, tmp_path / str(number)))
        what = f"case {number}: {_damage(folder, draw)}"
        status = main(["report", str(folder)])
        out, err = capsys.readouterr()
        if status == 0:
            assert out == f"{folder / 'report.html'}\n", what
            assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype")
            continue
        refused += 1
        assert (status, out) == (2, ""), what
        assert err.startswith("gt-train: "), what
        assert len(err.splitlines()) == 1, what
        assert [*folder.glob(".report*")] == []
        shutil.rmtree(folder)
    assert num_cases // 3 < refused < num_cases


def test_a_written_folder_is_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "Ordner ü"))
    assert main(["report", str(folder)]) == 0
    assert len(read_run(folder).steps) == 4


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl is not what a run writes: it[0] has no"),
        (
            "metrics.jsonl",
            '{"step": 1, "loss": "x"}\n',
            "metrics.jsonl is not what a run writes: it[0]['loss'] is 'x', not a number",
        ),
        (
            "starts.jsonl",
            '{"step": 1, "time": 1e300}\n',
            "starts.jsonl is not what a run writes: it[0]['time'] is 1e+300, not a time",
        ),
        (
            "captures.json",
            '[{"captured": "", "graphs": [[{"pass": "x"}]], "memory": null}]',
            "captures.json is not what a run writes: it[0]['graphs'][0][0] has no 'operators'",
        ),
        ("startup.json", '{"total": []}', "startup.json is not what a run writes: it['total'] is"),
    ],
)
def test_says_what_of_a_file_is_of_another_form(name: str, text: str, said: str, tmp_path: Path):
    folder = Path(shutil.copytree(WRITTEN, tmp_path / "run"))
    (folder / name).write_text(text)
    with pytest.raises(ReportError) as refused:
        read_run(folder)
    assert said in str(refused.value)
