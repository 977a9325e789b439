"""Real text that every machine has: the sources of Python's standard library and of torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_TOKENIZER_BYTES = 4_000_000
"""What the tokenizer is trained on: the first part."""


def token_rows(num_rows: int, seq: int, vocab: int) -> torch.Tensor:
    """Return rows of consecutive tokens.

    Args:
        num_rows: how many.
        seq: tokens that a row predicts.
        vocab: size of the vocabulary, which is byte-pair encoded and trained on the same text.

    Returns:
        (num_rows, seq + 1), int64: each row begins with the last token of the row before.

    Raises:
        ValueError: there is not so much text.
    """
    needed = num_rows * seq + 1
    texts = _texts()
    first: list[str] = []
    while sum(map(len, first)) < min(_TOKENIZER_BYTES, 4 * needed):
        first.append(next(texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(first, trainer)
    tokens = [token for text in tokenizer.encode_batch(first) for token in text.ids]
    while len(tokens) < needed:
        text = next(texts, None)
        if text is None:
            raise ValueError(f"there are {len(tokens)} tokens of text, {needed} are needed")
        tokens += tokenizer.encode(text).ids
    whole = torch.tensor(tokens[:needed])
    return torch.stack([whole[row * seq : (row + 1) * seq + 1] for row in range(num_rows)])


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    installed = Path(torch.__file__).resolve().parent
    for root in (library, installed):
        for path in sorted(root.rglob("*.py")):
            if root is library and "site-packages" in path.parts:
                continue
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # tests of Python's own decoders
