"""The tokenizer's build: reproducible, complete, and what the shipped files came from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Tokenizer

from gt_trainer.data.build_tokenizer import (
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tokenizer,
    describe_corpus,
    main,
    read_build,
)
from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.data.text_source import python_stdlib, text_directory

FILES = ("tokenizer.json", "tokenizer_config.json", "build.json")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Some hundred lines in which many pairs of tokens are equally frequent."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(words[i:] + words[:i]) + "\n", newline="\n")
    return folder


def build_in_new_process(texts: Path, out: Path, num_threads: int) -> None:
    """Two processes have different hash seeds, in Python and in Rust."""
    options = ["--text", str(texts), "--out", str(out), "--vocab-size", "330"]
    subprocess.run(
        [sys.executable, "-m", "gt_trainer.data.build_tokenizer", *options],
        env={**os.environ, "RAYON_NUM_THREADS": str(num_threads), "PYTHONHASHSEED": "random"},
        check=True,
        capture_output=True,
        text=True,
    )


def test_two_processes_build_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    build_in_new_process(texts, tmp_path / "one", num_threads=1)
    build_in_new_process(texts, tmp_path / "two", num_threads=4)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_importing_the_builder_leaves_torch_unloaded() -> None:
    code = "import gt_trainer.data.build_tokenizer, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "False\n"


def test_build_records_text_and_versions(texts: Path, tmp_path: Path) -> None:
    source = text_directory(texts)
    (texts / "latin.txt").write_bytes(b"\xff")
    build = build_tokenizer(text_directory(texts), tmp_path / "out", vocab_size=300)
    assert read_build(tmp_path / "out") == build
    assert build.tokenizers == tokenizers.__version__
    assert (build.corpus.num_documents, build.corpus.num_undecodable) == (8, 1)
    assert build.corpus.num_bytes == sum(document.num_bytes for document in source.documents)


def test_corpus_digest_sees_content_and_path(texts: Path) -> None:
    before = describe_corpus(text_directory(texts)).sha256
    assert describe_corpus(text_directory(texts)).sha256 == before
    (texts / "0.txt").rename(texts / "00.txt")
    renamed = describe_corpus(text_directory(texts)).sha256
    (texts / "00.txt").write_text("other")
    assert len({before, renamed, describe_corpus(text_directory(texts)).sha256}) == 3


def test_any_text_survives_encoding_and_decoding(texts: Path, tmp_path: Path) -> None:
    build_tokenizer(text_directory(texts), tmp_path / "out", vocab_size=300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "def f(x):\n\treturn 'schön' # 漢字 \x00\r\n  "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [
        (258, "vocab_size is 258; it must be at least 259: 256 bytes and 3 special tokens"),
        (
            5000,
            " of the 5000 tokens asked for; use more text, or a smaller vocab_size",
        ),
    ],
)
def test_refuses_a_vocabulary_that_does_not_fit(
    texts: Path, tmp_path: Path, vocab_size: int, expected: str
) -> None:
    with pytest.raises(ValueError, match="vocab_size") as error:
        build_tokenizer(text_directory(texts), tmp_path / "out", vocab_size=vocab_size)
    assert str(error.value).endswith(expected)


def test_command_reports_bad_input_in_one_line_with_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "missing")])
    assert exit_.value.code == 2
    assert f"error: text folder '{tmp_path}/missing' does not exist" in capsys.readouterr().err


def test_shipped_tokenizer_fits_debug_models_and_has_its_special_tokens() -> None:
    folder = shipped_tokenizer_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 2048
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == SPECIAL_TOKENS


def test_shipped_tokenizer_compresses_python() -> None:
    tokenizer = Tokenizer.from_file(str(shipped_tokenizer_path() / "tokenizer.json"))
    text = Path(json.__file__).read_text(encoding="utf-8")
    assert len(tokenizer.encode(text).ids) < 0.4 * len(text)


def test_rebuild_from_the_recorded_text_gives_the_shipped_bytes(tmp_path: Path) -> None:
    recorded = read_build(shipped_tokenizer_path())
    source = python_stdlib().split("train")
    if recorded.tokenizers != tokenizers.__version__:
        pytest.skip(f"built with tokenizers {recorded.tokenizers}, not {tokenizers.__version__}")
    if recorded.corpus.sha256 != describe_corpus(source).sha256:
        pytest.skip(f"built from {recorded.corpus.source}, not {source.name} as it is here")
    build_tokenizer(source, tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (shipped_tokenizer_path() / name).read_bytes()
