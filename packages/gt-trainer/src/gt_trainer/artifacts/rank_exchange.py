"""What ranks tell each other while they share captures: short JSON, and bytes of files.

Nothing is pickled: what a rank receives is data, whoever sent it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class CaptureFailedElsewhereError(ConnectionError):
    """Another rank could not capture its graph; it says why itself."""


class RankLostError(ConnectionError):
    """Another rank has ended, or did not answer in time: nobody says why but that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExchange:
    """All ranks of a run, which call each method together.

    Without a process group, and in a world of fake ranks, this rank is alone.

    Raises:
        RankLostError: from each method, if a rank has ended or did not answer within the time limit
            of the process group.
    """

    device: torch.device
    """Where the process group communicates."""

    is_alone: bool = False
    """Whether this rank speaks to no other, though there may be some."""

    @property
    def rank(self) -> int:
        """Of this process among those that exchange."""
        return dist.get_rank() if self._is_real() else 0

    def gather(self, row: object) -> list[Any]:
        """What each rank gives, in the order of ranks.

        Args:
            row: plain data that JSON can hold.
        """
        if not self._is_real():
            return [row]
        with _losing_ranks():
            return self._gathered(json.dumps(row).encode())

    def _gathered(self, own: bytes) -> list[Any]:
        num_ranks = dist.get_world_size()
        lengths = torch.zeros(num_ranks, dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(lengths, torch.tensor([len(own)], device=self.device))
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(own)] = self._tensor(own)
        gathered = torch.zeros(num_ranks * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(gathered, padded)
        rows = gathered.view(num_ranks, longest).cpu()
        return [
            json.loads(bytes(each[:length].tolist()))
            for each, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def broadcast(self, data: bytes | None, *, source: int) -> bytes:
        """The bytes that ``source`` gives, on every rank; others give None. They may be none."""
        if not self._is_real():
            assert data is not None
            return data
        with _losing_ranks():
            length = torch.tensor([len(data) if data is not None else 0], device=self.device)
            dist.broadcast(length, source)
            if not int(length):
                return b""
            tensor = (
                torch.empty(int(length), dtype=torch.uint8, device=self.device)
                if data is None
                else self._tensor(data)
            )
            dist.broadcast(tensor, source)
            return tensor.cpu().numpy().tobytes()

    def all_succeeded(self, failed: BaseException | None, *, what: str) -> None:
        """Make sure that no rank failed; to be called where a rank may have.

        Args:
            failed: what this rank raised; None if nothing.
            what: a text for what was tried.

        Raises:
            BaseException: what this rank raised.
            CaptureFailedElsewhereError: other ranks failed; the same on all that did not.
        """
        failures: Sequence[str | None] = self.gather(failed and _summary(failed))
        if failed is not None:
            raise failed
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CaptureFailedElsewhereError(f"rank {rank} {what}: {failure}")

    def _is_real(self) -> bool:
        if self.is_alone or not dist.is_initialized():
            return False
        return dist.get_world_size() > 1 and dist.get_backend() != "fake"

    def _tensor(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


@contextmanager
def _losing_ranks() -> Iterator[None]:
    """Inside, ranks wait for each other; what a process group raises means that one is lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            "another rank has ended, or captured for longer than --comm.init_timeout_seconds, "
            f"while ranks share captured graphs; its own log says why ({_summary(error)})"
        ) from error


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


ALONE = RankExchange(device=torch.device("cpu"), is_alone=True)
"""One rank that asks nobody."""
