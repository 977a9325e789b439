"""What a run of passes did, pass by pass: as data, and as a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gt_passes.contract import PassReport
from gt_passes.verifier.declared_bounds import GraphSize
from gt_passes.verifier.repropagation import UnverifiedNode


@dataclass(slots=True)
class Elapsed:
    """Time that passed inside a ``with`` statement, in nanoseconds."""

    wall_ns: int = 0
    cpu_ns: int = 0
    """Processor time, of all threads."""

    def __enter__(self) -> Self:
        self.wall_ns = -time.perf_counter_ns()
        self.cpu_ns = -time.process_time_ns()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cpu_ns += time.process_time_ns()
        self.wall_ns += time.perf_counter_ns()

    def __add__(self, other: Elapsed) -> Elapsed:
        return Elapsed(self.wall_ns + other.wall_ns, self.cpu_ns + other.cpu_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass in one run."""

    name: str
    only_cleans_up: bool
    """As the pass declares."""

    report: PassReport
    before: GraphSize
    after: GraphSize

    op_count_differences: Mapping[str, int]
    """How many more calls of each operator (negative: fewer), sorted by name. Only changes."""

    elapsed: Elapsed
    """Time of the pass itself."""

    verification: Elapsed
    """Time of the verifier after the pass; 0 when it was off."""

    dump_before: Path | None = None
    dump_after: Path | None = None
    """Files with the graph as text; None when none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassManagerReport:
    """A whole run. ``str(report)`` is a table with one line a pass."""

    records: tuple[PassRecord, ...]
    """In the order in which the passes ran."""

    verified: bool
    """Whether the verifier was on."""

    unverified: tuple[UnverifiedNode, ...]
    """Nodes of the final graph on which fake re-propagation says nothing."""

    capture_verification: Elapsed
    """Time of the verifier on the graph as captured, before any pass; 0 when it was off."""

    complete_verification: Elapsed
    """Time of the one complete verification after all passes; 0 when it was off."""

    recompilation: Elapsed
    """Time of the one recompilation at the end."""

    summary_before: object = None
    """What the manager's ``summarize`` said of the graph before all passes; None if nobody asked,
    and of a graph that was loaded."""

    summary_after: object = None
    """Likewise, after the passes that generate no code."""

    @property
    def total(self) -> Elapsed:
        """Everything: passes, verification, recompilation."""
        total = self.capture_verification + self.complete_verification + self.recompilation
        return sum((each.elapsed + each.verification for each in self.records), start=total)

    def followed_by(self, later: PassManagerReport) -> PassManagerReport:
        """One report on two runs over the same graph, of which ``later`` ran the further passes."""
        return PassManagerReport(
            records=(*self.records, *later.records),
            verified=self.verified and later.verified,
            unverified=later.unverified,
            capture_verification=self.capture_verification + later.capture_verification,
            complete_verification=self.complete_verification + later.complete_verification,
            recompilation=self.recompilation + later.recompilation,
            summary_before=self.summary_before,
            summary_after=self.summary_after,
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def differences(self) -> str:
        """What each pass changed: bytes, estimated peak memory, and how many calls of what.

        Passes that changed nothing are left out; peak memory where it was not estimated.
        """
        return "\n".join(line for record in self.records for line in _differences(record))

    def _lines(self) -> Iterator[str]:
        names = [record.name for record in self.records]
        width = max(map(len, (*names, "(recompilation)")))
        yield f"{'pass':<{width}}  {'ops':>15}  {'cpu ms':>8}  {'verify ms':>9}  done"
        yield _line(width, "(capture)", "", 0, self.capture_verification.cpu_ns, "")
        for record in self.records:
            ops = f"{record.before.num_ops} -> {record.after.num_ops}"
            done = ", ".join(f"{name} {count}" for name, count in record.report.counts.items())
            refused = len(record.report.refusals)
            done = (done or "nothing") + (f"; refused {refused}" if refused else "")
            yield _line(
                width, record.name, ops, record.elapsed.cpu_ns, record.verification.cpu_ns, done
            )
        if self.verified and self.records:
            yield _line(width, "(all passes)", "", 0, self.complete_verification.cpu_ns, "")
        yield _line(width, "(recompilation)", "", self.recompilation.cpu_ns, 0, "")
        if not self.verified:
            yield "The verifier was off."
        if self.unverified:
            targets = sorted({node.target for node in self.unverified})
            yield (
                f"{len(self.unverified)} nodes could not be re-propagated on fake values: "
                + ", ".join(targets)
            )


def _differences(record: PassRecord) -> Iterator[str]:
    before, after = record.before, record.after
    changes = [f"{count:+d} {op}" for op, count in record.op_count_differences.items()]
    if before.collective_bytes != after.collective_bytes:
        sizes = f"{before.collective_bytes:,} -> {after.collective_bytes:,}"
        changes.insert(0, f"bytes given to collectives {sizes}")
    old, new = before.peak_memory_bytes, after.peak_memory_bytes
    if old is not None and new is not None and old != new:
        changes.insert(0, f"estimated peak memory {_mib(old)} -> {_mib(new)} MiB")
    if changes:
        yield record.name
        yield from (f"  {change}" for change in changes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _line(width: int, name: str, ops: str, cpu_ns: int, verify_ns: int, done: str) -> str:
    line = f"{name:<{width}}  {ops:>15}  {cpu_ns / 1e6:>8.1f}  {verify_ns / 1e6:>9.1f}  {done}"
    return line.rstrip()
