"""Every command that a page shows is one that this checkout takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from gt_trainer.command_line.command_line import parse_command_line
from gt_trainer.command_line.early_refusal import refuse_early
from gt_trainer.command_line.known_flags import explain_flags
from gt_trainer.models.catalog import INTENDED_WORLD_SIZE

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("examples/*.md")),
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "how-to.md",
    *sorted(ROOT.glob("docs/tutorials/*.md")),
]
"""Those for users."""

WITH_PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
STAND_INS = {"FOLDER": "my/llama", "N": "2"}
"""What prose calls by a word in capitals, and one of it."""


def commands(page: Path) -> Iterator[str]:
    """The lines of fenced blocks that are no program's."""
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in ("", "sh"):
            yield from block.replace("\\\n", " ").splitlines()


def code_in_prose(page: Path, pattern: str) -> list[str]:
    """What sentences and tables set as code, and a pattern matches."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = dict.fromkeys(re.findall(rf"`((?:\S*/)?{pattern})`", prose))
    return [re.sub(r"\b[A-Z]+\b", lambda word: STAND_INS[word[0]], each) for each in found]


SHOWN = [
    pytest.param(page, shlex.split(line, comments=True), id=f"{page.relative_to(ROOT)}: {line}")
    for pages, found_in in (
        (PAGES, commands),
        (WITH_PROSE, lambda page: code_in_prose(page, "gt-train [^`]+")),
        (WITH_PROSE, lambda page: code_in_prose(page, "make [a-z][^`=]+")),
    )
    for page in pages
    for line in found_in(page)
    if line.strip() and not line.startswith("#")
]
FLAGS = [
    pytest.param(flag, id=f"{page.relative_to(ROOT)}: {flag}")
    for page in [*WITH_PROSE, ROOT / "docs" / "what-works-with-what.md"]
    for flag in dict.fromkeys(re.findall(r"`(--[\w-]+[.][\w.-]*\w)", page.read_text("utf-8")))
]


def of_program(program: str) -> list[object]:
    return [each for each in SHOWN if Path(each.values[1][0]).name == program]  # type: ignore[index]


def test_pages_show_commands_of_these_programs_and_no_other():
    programs = {Path(each.values[1][0]).name for each in SHOWN}  # type: ignore[index]
    assert programs == {"gt-train", "make", "pip", "python", "torchrun"}
    assert len(of_program("gt-train")) > 40


@pytest.mark.parametrize(("page", "words"), of_program("gt-train"))
def test_a_command_of_gt_train_is_accepted_as_far_as_it_is_judged_without_torch(
    page: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.json").touch()  # somebody's hardware
    (tmp_path / "my_run.py").touch()  # somebody's module
    their_model = tmp_path / "my" / "llama"
    their_model.mkdir(parents=True)
    (their_model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (their_model / "tokenizer.json").touch()
    command = parse_command_line(words[1:])
    # What is too large for this machine is started on as many ranks as it is meant for.
    intended = INTENDED_WORLD_SIZE.get(command.config, 1)
    if command.action in ("train", "dry-run", "precompile"):
        refuse_early(command, command.world_size or command.num_processes or intended)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_a_sentence_names_is_there(flag: str):
    value = "1"  # not of every flag's kind, which is not asked here
    assert not [each for each in explain_flags([flag, value]) if each.startswith("no flag")]


@pytest.mark.parametrize(("page", "words"), of_program("make"))
def test_a_target_of_make_is_there(page: Path, words: list[str]):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for word in words[1:] if "=" not in word and not word.startswith("-")):
        assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "words"), [*of_program("torchrun"), *of_program("python")])
def test_a_program_of_the_examples_is_there_and_says_the_same_of_itself(
    page: Path, words: list[str]
):
    (program,) = (word for word in words if word.endswith(".py"))
    start = words[: words.index(program) + 1]
    assert shlex.join(start) in (ROOT / program).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "words"), of_program("pip"))
def test_what_is_installed_from_here_is_here(page: Path, words: list[str]):
    for word in words[1:]:
        if word.startswith("./"):
            assert (ROOT / word.partition("[")[0] / "pyproject.toml").is_file()
