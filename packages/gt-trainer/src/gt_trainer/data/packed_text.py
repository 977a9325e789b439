"""Documents, tokenized and packed into fixed-length sequences; exactly resumable.

What a sequence looks like follows torchtitan's text data set (torchtitan 0.3.0,
`torchtitan/hf_datasets/text_datasets.py`), since its models, masks and losses expect it: inputs
and labels are shifted *within* a document, so that the last token of one never predicts the
first of the next; documents follow each other without padding; positions restart at 0 at every
document, and where a sequence begins within one.

How the stream is dealt out and resumed is ours:

- The order is a hash of (seed, epoch, path), so that it needs no random generator and is the
  same on every rank and in every version of Python.
- Where the next sequence begins is three integers (epoch, document, token). That is the whole
  state: resuming tokenizes one document again, and no buffer is kept in a checkpoint.
- An endless stream deals *documents* to the data-parallel ranks: each tokenizes only its own.
  A single pass deals *sequences*: every rank packs the same stream and takes its share of each
  group, so that all ranks get the same number of batches (a rank that ended early would leave
  the others waiting in a collective) and a validation loss does not depend on their number.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset

from gt_trainer.data.document_files import Document, TextSourceError
from gt_trainer.data.text_source import TextSource

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input": int64 [B, L], "positions": int64 [B, L]}, labels int64 [B, L])."""


class DataResumeError(ValueError):
    """A saved position in the data does not fit the data of this run."""


class DocumentTokenizer(Protocol):
    """The part of torchtitan's tokenizers that is used here."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        """Return the token ids of a document."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in the stream a sequence begins.

    Args:
        epoch: Passes completed.
        document: Index in this epoch's order of this rank's documents.
        token: Tokens of that document already used.
    """

    epoch: int = 0
    document: int = 0
    token: int = 0


@dataclass(slots=True, kw_only=True)
class _Sequence:
    inputs: torch.Tensor  # [L]
    labels: torch.Tensor  # [L]
    positions: torch.Tensor  # [L]

    @classmethod
    def empty(cls, seq_len: int) -> "_Sequence":
        inputs, labels, positions = torch.empty(3, seq_len, dtype=torch.int64).unbind()
        return cls(inputs=inputs, labels=labels, positions=positions)


class PackedText(IterableDataset[Batch], Stateful):
    """Batches of packed sequences from a text source.

    Documents are read and tokenized when their turn comes; starting costs one document. Those
    that are not UTF-8 are skipped, with one warning each.

    Args:
        source: The documents.
        tokenizer: Turns a document into token ids, with its bos and eos.
        seq_len: Tokens of a sequence (L).
        batch_size: Sequences of a batch (B) on one rank.
        dp_rank: This rank among the data-parallel ranks.
        dp_world_size: Data-parallel ranks.
        seed: Chooses the order of documents.
        infinite: Endless, in a new order each epoch; otherwise one pass, without the sequences
            at its end that do not fill a batch on every rank.

    Raises:
        ValueError: Sizes or ranks are out of range (all are named).
        TextSourceError: Fewer documents than ranks; while iterating: not one batch of text.
    """

    def __init__(
        self,
        source: TextSource,
        *,
        tokenizer: DocumentTokenizer,
        seq_len: int,
        batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        infinite: bool = True,
    ) -> None:
        problems = [
            f"{name} is {value}; it must be at least 1"
            for name, value in (("seq_len", seq_len), ("batch_size", batch_size))
            if value < 1
        ]
        if not 0 <= dp_rank < dp_world_size:
            problems.append(f"dp_rank is {dp_rank}; it must be in [0, {dp_world_size})")
        if problems:
            raise ValueError("; ".join(problems))
        if infinite and len(source.documents) < dp_world_size:
            raise TextSourceError(
                f"{source.name} has {len(source.documents)} document(s), fewer than the "
                f"{dp_world_size} data-parallel ranks; give more files, or use fewer ranks"
            )
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.seed = seed
        self.infinite = infinite
        self._position = Position()
        self._undecodable: set[str] = set()

    @property
    def num_undecodable(self) -> int:
        """Documents met so far that have no text: not UTF-8, or rows without any."""
        return len(self._undecodable)

    def __iter__(self) -> Iterator[Batch]:
        group_size, mine = self.batch_size, slice(None)
        if not self.infinite:
            group_size = self.batch_size * self.dp_world_size
            mine = slice(self.dp_rank * self.batch_size, (self.dp_rank + 1) * self.batch_size)
        start = self._position
        group: list[_Sequence] = []
        for sequence, end in self._sequences(start):
            group.append(sequence)
            if len(group) < group_size:
                continue
            # Before the yield: a state taken while the caller holds this batch is the next one's.
            self._position = end
            yield _stack(group[mine])
            group = []
        if start == Position() == self._position:
            raise TextSourceError(
                f"{self.source.name} gives {len(group)} sequence(s) of {self.seq_len} tokens, but "
                f"one batch on every rank takes {group_size} (local batch size {self.batch_size} "
                f"x {self.dp_world_size} data-parallel ranks); give more text, or lower "
                "--training.seq_len or --training.local_batch_size"
            )
        self._position = Position()  # the next iteration is a new pass

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch begins, and what it is a position in."""
        position = self._position
        return {
            "epoch": position.epoch,
            "document": position.document,
            "token": position.token,
            **self._identity(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        seq_len and batch_size may differ from then: the position does not depend on them.

        Raises:
            DataResumeError: Documents, seed or kind of stream are not those of then.
        """
        differing = [
            f"{key} (saved {state_dict.get(key)!r}, now {value!r})"
            for key, value in self._identity().items()
            if state_dict.get(key) != value
        ]
        if differing:
            raise DataResumeError(
                f"cannot continue in the data where the checkpoint stopped: {', '.join(differing)} "
                f"changed; resume with the same text as then (now {self.source.name}) and the "
                "same settings, or start a new run"
            )
        self._position = Position(
            epoch=state_dict["epoch"],
            document=state_dict["document"],
            token=state_dict["token"],
        )

    def _identity(self) -> dict[str, Any]:
        """What the three integers of a position mean nothing without."""
        digest = hashlib.sha256()
        for document in self.source.documents:
            digest.update(f"{document.num_bytes} {document.name}\n".encode(errors="replace"))
        has_rows = any(document.row is not None for document in self.source.documents)
        return {
            "documents": digest.hexdigest()[:16],
            "num_documents": len(self.source.documents),
            "seed": self.seed,
            "infinite": self.infinite,
            **({"text_field": self.source.text_field} if has_rows else {}),
        }

    def _order(self, epoch: int) -> list[Document]:
        """Return this rank's documents in the order of one epoch.

        Rows that are unpacked at once stay neighbours.
        """

        def key(document: Document) -> tuple[bytes, int]:
            text = f"{self.seed}/{epoch}/{document.read_with}"
            place = document.row or 0
            return hashlib.sha256(text.encode(errors="replace")).digest(), place

        order = sorted(self.source.documents, key=key)
        return order[self.dp_rank :: self.dp_world_size] if self.infinite else order

    def _sequences(self, start: Position) -> Iterator[tuple[_Sequence, Position]]:
        """Yield each full sequence with the position where the next one begins."""
        sequence, num_filled = _Sequence.empty(self.seq_len), 0
        position = start
        while True:
            order = self._order(position.epoch)
            num_used = 0
            for index in range(position.document, len(order)):
                tokens = self._tokens(order[index])
                num_pairs = len(tokens) - 1  # of a token and the one that follows it
                first = position.token if index == position.document else 0
                num_used += max(num_pairs, 0)
                while first < num_pairs:
                    count = min(self.seq_len - num_filled, num_pairs - first)
                    filling = slice(num_filled, num_filled + count)
                    sequence.inputs[filling] = tokens[first : first + count]
                    sequence.labels[filling] = tokens[first + 1 : first + 1 + count]
                    # From 0 at a document's start, and where the sequence enters one midway.
                    sequence.positions[filling] = torch.arange(count)
                    num_filled, first = num_filled + count, first + count
                    if num_filled < self.seq_len:
                        continue
                    end = Position(epoch=position.epoch, document=index, token=first)
                    if first == num_pairs:
                        end = Position(epoch=position.epoch, document=index + 1)
                    yield sequence, end
                    sequence, num_filled = _Sequence.empty(self.seq_len), 0
            if not self.infinite:
                return
            if num_used == 0 and position.document == 0:
                raise TextSourceError(
                    f"none of the {len(order)} document(s) of {self.source.name} for "
                    f"data-parallel rank {self.dp_rank} has UTF-8 text in it"
                )
            position = Position(epoch=position.epoch + 1)
            logger.info("%s: epoch %d begins", self.source.name, position.epoch)

    def _tokens(self, document: Document) -> torch.Tensor:
        text = self.source.read(document)
        if text is None:
            if document.name not in self._undecodable:
                self._undecodable.add(document.name)
                name, reason = self.source.root / document.name, self.source.why_no_text(document)
                logger.warning("skipped %s: %s", name, reason)
            return torch.empty(0, dtype=torch.int64)
        token_ids = self.tokenizer.encode(text, add_bos=True, add_eos=True)
        return torch.tensor(token_ids, dtype=torch.int64)


def _stack(sequences: list[_Sequence]) -> Batch:
    inputs = torch.stack([sequence.inputs for sequence in sequences])
    positions = torch.stack([sequence.positions for sequence in sequences])
    labels = torch.stack([sequence.labels for sequence in sequences])
    return {"input": inputs, "positions": positions}, labels
