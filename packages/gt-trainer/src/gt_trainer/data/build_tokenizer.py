"""Build the tokenizer that gt-trainer ships: `python -m gt_trainer.data.build_tokenizer`.

A byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2) trained with Hugging Face's
`tokenizers`. Training is deterministic, so what a rebuild needs is the same text and the same
library: `build.json` records the Python whose standard library was the text, the SHA-256 over
that text, and the version of `tokenizers`. With all three alike a rebuild gives the same bytes.

Only training documents are read, so that validation text is new to the tokenizer too. Nothing
here imports torch.
"""

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gt_trainer.data.text_source import TextSource, python_stdlib, text_directory

VOCAB_SIZE = 2048
"""Tokens in all; what torchtitan's llama3, qwen3 and deepseek_v3 debug models embed."""

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"
PAD_TOKEN = "<|pad|>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)
"""The tokens 0, 1 and 2."""

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
BUILD_FILE = "build.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What a tokenizer was trained on.

    Args:
        source: Description for people.
        num_documents: Documents that were read.
        num_undecodable: Documents left out because they are not UTF-8.
        num_bytes: UTF-8 bytes read.
        sha256: Over path, length and content of every document read, in order.
    """

    source: str
    num_documents: int
    num_undecodable: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBuild:
    """The record kept beside a tokenizer, as `build.json`.

    Args:
        python: Version of the interpreter that built it.
        tokenizers: Version of the `tokenizers` library.
        vocab_size: Tokens, special ones included.
        corpus: The text.
        tokenizer_sha256: Of `tokenizer.json`.
    """

    python: str
    tokenizers: str
    vocab_size: int
    corpus: Corpus
    tokenizer_sha256: str


def describe_corpus(source: TextSource) -> Corpus:
    """Read every document once and return what identifies the text."""
    digest = hashlib.sha256()
    num_documents = num_undecodable = num_bytes = 0
    for document in source.documents:
        text = source.read(document)
        if text is None:
            num_undecodable += 1
            continue
        content = text.encode("utf-8")
        path = document.name.encode("utf-8", "surrogateescape")
        # Lengths first, so that moving bytes from one field to the next changes the digest.
        digest.update(f"{len(path)} {len(content)}\n".encode())
        digest.update(path)
        digest.update(content)
        num_documents += 1
        num_bytes += len(content)
    return Corpus(
        source=source.name,
        num_documents=num_documents,
        num_undecodable=num_undecodable,
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
    )


def build_tokenizer(
    source: TextSource, out: str | Path, *, vocab_size: int = VOCAB_SIZE
) -> TokenizerBuild:
    """Train a tokenizer on a text source and write its three files.

    Args:
        source: All of its documents are used; pass a training split.
        out: Folder for `tokenizer.json`, `tokenizer_config.json` and `build.json`; made if
            missing.
        vocab_size: Tokens wanted, special ones included; at least 259 (256 bytes and the
            special tokens).

    Returns:
        What `build.json` says.

    Raises:
        ValueError: The vocabulary is too small for bytes, or too large for this text.
        OSError: The folder cannot be written.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be at least {smallest}: 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(source), trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"{source.name} gives only {tokenizer.get_vocab_size()} of the {vocab_size} tokens "
            "asked for; use more text, or a smaller vocab_size"
        )
    content = tokenizer.to_str(pretty=True) + "\n"
    build = TokenizerBuild(
        python=platform.python_version(),
        tokenizers=tokenizers.__version__,
        vocab_size=vocab_size,
        corpus=describe_corpus(source),
        tokenizer_sha256=hashlib.sha256(content.encode("utf-8")).hexdigest(),
    )
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS_TOKEN,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TOKENIZER_FILE, content)
    _write(folder / TOKENIZER_CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    _write(folder / BUILD_FILE, json.dumps(asdict(build), indent=2) + "\n")
    return build


def read_build(folder: str | Path) -> TokenizerBuild:
    """Return the record of how the tokenizer in a folder was built."""
    fields = json.loads((Path(folder) / BUILD_FILE).read_text(encoding="utf-8"))
    return TokenizerBuild(**{**fields, "corpus": Corpus(**fields["corpus"])})


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gt_trainer.data.build_tokenizer",
        description="Build gt-trainer's tokenizer: a byte-level BPE in the Hugging Face format.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--text",
        metavar="DIR",
        help="folder of .txt, .md, .py, .jsonl or .parquet files (default: the sources of this "
        "Python's standard library)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=VOCAB_SIZE, help="tokens in all (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        source = text_directory(arguments.text) if arguments.text else python_stdlib()
        build = build_tokenizer(
            source.split("train"), arguments.out, vocab_size=arguments.vocab_size
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write(
        f"{arguments.out}: {build.vocab_size} tokens from {build.corpus.num_documents} documents "
        f"({build.corpus.num_bytes:,} bytes) of {build.corpus.source}; "
        f"{TOKENIZER_FILE} has SHA-256 {build.tokenizer_sha256}\n"
    )
    return 0


def _texts(source: TextSource) -> Iterator[str]:
    for document in source.documents:
        text = source.read(document)
        if text is not None:
            yield text


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    sys.exit(main())
