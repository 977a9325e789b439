"""The text dataloader, as torchtitan's Trainer and Validator build it from a configuration.

Both call `config.build(dp_world_size=..., dp_rank=..., tokenizer=..., seq_len=...,
local_batch_size=...)`; the Validator sets `infinite` itself (False when it is to take the whole
split). torchtitan's own text loader needs `datasets`, which nothing here imports.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import ParallelAwareDataloader

from gt_config import ConfigError, Violation
from gt_trainer.checkpoints.plain_reader import plain_value_of
from gt_trainer.data.packed_text import DataResumeError, DocumentTokenizer, PackedText
from gt_trainer.data.text_source import (
    DEFAULT_TEXT_FIELD,
    DEFAULT_VALIDATION_FRACTION,
    Split,
    TextSource,
    python_stdlib,
    text_directory,
)


class StdlibTextDataLoader(ParallelAwareDataloader):
    """Batches of packed text: the running Python's standard library, or a folder of files.

    Yields ({"input": [B, L], "positions": [B, L]}, labels [B, L]), int64, of constant shape. See
    `gt_trainer.data.packed_text` for what a sequence is and how ranks share the text.

    Args:
        config: What to read, and how.
        dp_world_size: Data-parallel ranks.
        dp_rank: This rank among them.
        tokenizer: Turns a document into token ids.
        seq_len: Tokens of a sequence (L).
        local_batch_size: Sequences of a batch on this rank (B).
        snapshot_every_n_steps: Passed on to torchdata; matters only with a worker process.

    Raises:
        ValueError: An option is out of range, or (TextSourceError) there is no such text.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """What to read, and how."""

        dataset: str = "stdlib"
        """The text that comes with every machine: the running Python's standard library."""

        dataset_path: str | None = None
        """Folder to read instead: .txt, .md and .py files, one document each, and .jsonl and
        .parquet files, one document a row."""

        text_field: str = DEFAULT_TEXT_FIELD
        """Field or column with the text of a document, in .jsonl and .parquet files."""

        split: Split = "train"
        """Which side of the split to read; a hash of a document's name decides its side."""

        validation_fraction: float = DEFAULT_VALIDATION_FRACTION
        """Share of the documents that is kept for validation."""

        infinite: bool = True
        """Start again, in a new order, when all documents have been read."""

        seed: int = 0
        """Chooses the order of the documents."""

        def wrong_options(self, section: str = "--dataloader") -> Iterator[Violation]:
            """Yield the options that are out of range, by flags that begin with `section`."""
            if self.dataset != "stdlib":
                yield Violation(
                    flag=f"{section}.dataset",
                    value=self.dataset,
                    allowed="'stdlib', the only text with a name",
                    fix=f"leave the flag out; {section}.dataset_path names a folder of your own",
                )
            if self.num_workers not in (0, 1):
                yield Violation(
                    flag=f"{section}.num_workers",
                    value=self.num_workers,
                    allowed="0, to read in the training process, or 1: one stream of text is not "
                    "dealt to several workers",
                    fix="use 0 or 1",
                )

        def open_text(self) -> TextSource:
            """Return the documents that this configuration names.

            Quick (of text files it reads none, of others where rows are), so that a launcher can
            call it to refuse bad input before any process group exists.

            Raises:
                ConfigError: Options are out of range.
                TextSourceError: There is no such text.
            """
            wrong = tuple(self.wrong_options())
            if wrong:
                raise ConfigError(wrong)
            everything = (
                python_stdlib()
                if self.dataset_path is None
                else text_directory(self.dataset_path, text_field=self.text_field)
            )
            return everything.split(self.split, validation_fraction=self.validation_fraction)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: DocumentTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        self.text = PackedText(
            config.open_text(),
            tokenizer=tokenizer,
            seq_len=seq_len,
            batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            seed=config.seed,
            infinite=config.infinite,
        )
        with warnings.catch_warnings():
            # torchdata 0.11 calls it itself; nothing that a person who trains could act on.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(
                self.text,
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                batch_size=None,  # PackedText yields whole batches: a state falls between two
                num_workers=config.num_workers,
                persistent_workers=config.persistent_workers,
                prefetch_factor=config.prefetch_factor,
                pin_memory=config.pin_memory,
                snapshot_every_n_steps=snapshot_every_n_steps,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; an empty one is a fresh start.

        Raises:
            DataResumeError: It was taken with another number of data-parallel ranks, has nothing
                for this rank, or belongs to other text.
            NotPlainDataError: It is no plain value.
        """
        if not state_dict:
            return
        saved_world_size = state_dict.get("world_size")
        if saved_world_size != self.dp_world_size or self._rank_id not in state_dict:
            raise DataResumeError(
                f"the checkpoint's data position is for {saved_world_size} data-parallel rank(s) "
                f"and this run has {self.dp_world_size} (rank {self.dp_rank} looks for "
                f"{self._rank_id!r}): documents are dealt to a fixed number of ranks; resume with "
                "the same data-parallel degree, or leave the position out with "
                "--checkpoint.exclude_from_loading dataloader"
            )
        plain_value_of(state_dict[self._rank_id])  # torchtitan would run what it names
        super().load_state_dict(state_dict)
