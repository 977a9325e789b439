"""Every exception that gt-passes raises on purpose, in one tree.

::

    Exception
    └── GtPassesError
        ├── PassDeclarationError  (TypeError)     a pass class breaks the contract
        ├── ForwardChunkingError  (ValueError)    a module cannot run in chunks as asked
        ├── ChunkMetadataError    (ValueError)    a graph's chunk metadata contradict themselves
        ├── GraphChunkingError    (ValueError)    a graph cannot run modules in chunks
        ├── UnknownPassError      (ValueError)    a name that no registered pass has
        ├── RecipeError           (ValueError)    passes added or left out contradict each other
        ├── PassReportDataError   (ValueError)    data that are no report of passes
        ├── CollectiveMismatchError (RuntimeError) ranks would run different collectives
        ├── CudaGraphAddressError (RuntimeError)  what should stay in place keeps moving
        ├── GraphInputError       (ValueError)    a graph that passes cannot work on
        ├── InductorOptionError   (ValueError)    an option that this PyTorch's Inductor lacks
        └── VerificationError     (RuntimeError)  a graph is broken; names the pass that broke it

A pass that is handed a graph which it must not change does not raise: it leaves the place alone
and says so in ``PassReport.refusals``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from gt_passes.graph_problem import GraphProblem

_MAX_SHOWN_PROBLEMS = 10

NO_FAKE_VALUES = (
    'no node has a fake tensor in node.meta["val"]: trace with fake tensors '
    '(make_fx(..., tracing_mode="fake"))'
)
"""What ``GraphInputError`` says of a graph in which nothing can be run on fake values."""


class GtPassesError(Exception):
    """Base of every error that gt-passes raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled without its constructor, which may take keywords only.
        return (_rebuild, (type(self), self.args, vars(self)))


def _rebuild(
    error_class: type[GtPassesError], args: tuple[object, ...], state: dict[str, object]
) -> GtPassesError:
    error = error_class.__new__(error_class, *args)
    vars(error).update(state)
    return error


class _ProblemsError(GtPassesError):
    """Lists every problem, below a line that says what they prevent."""

    _heading: ClassVar[str]

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n  - ".join([self._heading, *self.problems])


class PassDeclarationError(GtPassesError, TypeError):
    """A pass class breaks the contract; the message lists every way in which it does."""

    def __init__(self, class_name: str, problems: Iterable[str]) -> None:
        self.class_name = class_name
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(self.class_name, self.problems)

    def __str__(self) -> str:
        return "\n  - ".join(
            [f"{self.class_name} does not declare a pass as the contract asks:", *self.problems]
        )


class ForwardChunkingError(GtPassesError, ValueError):
    """A module's forward cannot run in chunks; the message lists every reason and what was seen."""

    def __init__(
        self,
        *,
        region_root: str,
        what: str,
        problems: Iterable[str],
        signature: str = "",
        seen: str = "",
    ) -> None:
        self.region_root = region_root
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        self.signature = signature
        self.seen = seen
        super().__init__(region_root, what, self.problems, signature, seen)

    def __str__(self) -> str:
        lines = [f"{self.region_root} cannot run in {self.what}:"]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.signature:
            lines.append(f"  its forward is {self.signature}")
        if self.seen:
            lines.append(f"  it was called with {self.seen}")
        return "\n".join(lines)


class ChunkMetadataError(_ProblemsError, ValueError):
    """Chunk metadata contradict themselves; the message names each region and node."""

    _heading = "the chunks of this graph cannot be scheduled:"


class GraphChunkingError(_ProblemsError, ValueError):
    """A graph cannot be run in chunks; every reason found is listed."""

    _heading = "the graph cannot be run in chunks:"

    @property
    def shown_problems(self) -> list[str]:
        """The first ones, and how many more there are."""
        shown = list(self.problems[:_MAX_SHOWN_PROBLEMS])
        if len(self.problems) > _MAX_SHOWN_PROBLEMS:
            shown.append(
                f"and {len(self.problems) - _MAX_SHOWN_PROBLEMS} more, in "
                "GraphChunkingError.problems"
            )
        return shown

    def __str__(self) -> str:
        return "\n  - ".join([self._heading, *self.shown_problems])


class UnknownPassError(GtPassesError, ValueError):
    """One or more names that no registered pass has, each with its near matches."""

    def __init__(self, names: Iterable[str], *, known: Iterable[str]) -> None:
        self.names: tuple[str, ...] = tuple(names)
        self.known: tuple[str, ...] = tuple(sorted(known))
        super().__init__(self.names, self.known)

    def __str__(self) -> str:
        lines = []
        for name in self.names:
            near = difflib.get_close_matches(name, self.known, n=3)
            hint = f"; did you mean {_join_quoted(near)}?" if near else ""
            lines.append(f"no graph pass is named {name!r}{hint}")
        return "\n".join([*lines, f"known passes: {', '.join(self.known) or 'none'}"])


class RecipeError(_ProblemsError, ValueError):
    """The passes to add and to leave out contradict the recipe or each other; all at once."""

    _heading = "the recipe cannot be built:"


class PassReportDataError(GtPassesError, ValueError):
    """Data that should be a stored report of passes are none; the message names the field."""


class CudaGraphAddressError(GtPassesError, RuntimeError):
    """Tensors that a CUDA graph reads in place keep moving to other addresses."""

    def __init__(self, input_names: Iterable[str], *, num_recordings: int) -> None:
        self.input_names: tuple[str, ...] = tuple(input_names)
        self.num_recordings = num_recordings
        super().__init__(self.input_names, num_recordings)

    def __str__(self) -> str:
        return (
            f"{', '.join(self.input_names)}: the address has changed again, after "
            f"{self.num_recordings} recordings. A CUDA graph reads parameters and buffers where "
            "they are: update them in place, or run without cuda-graphs"
        )


class GraphInputError(GtPassesError, ValueError):
    """A graph lacks what every pass and the verifier rely on."""


class InductorOptionError(GtPassesError, ValueError):
    """One or more options that this PyTorch's Inductor does not have."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names: tuple[str, ...] = tuple(names)
        super().__init__(self.names)

    def __str__(self) -> str:
        plural = "s" if len(self.names) > 1 else ""
        return (
            f"Inductor has no option{plural} {', '.join(map(repr, self.names))}: "
            "torch._inductor.list_options() lists those of the installed PyTorch"
        )


class CollectiveMismatchError(GtPassesError, RuntimeError):
    """Ranks would run different collectives, and hang; raised on all of them.

    Attributes:
        ranks: the global ranks that differ from most.
    """

    def __init__(self, message: str, *, ranks: Iterable[int]) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(message)


class VerificationError(GtPassesError, RuntimeError):
    """A graph is broken.

    Attributes:
        after: what had just run: "the pass remove-dead-code", or "capture" when the graph was
            broken before any pass.
        problems: every problem found.
        reproduce: what to do to see it again, in words.
    """

    def __init__(self, *, after: str, problems: Sequence[GraphProblem], reproduce: str) -> None:
        self.after = after
        self.problems: tuple[GraphProblem, ...] = tuple(problems)
        self.reproduce = reproduce
        super().__init__(after, self.problems, reproduce)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"after {self.after}, the graph has {count} problem{'' if count == 1 else 's'}:"]
        for number, problem in enumerate(self.problems[:_MAX_SHOWN_PROBLEMS], start=1):
            bullet = f"  {number}. "
            indent = "\n" + " " * len(bullet)
            lines.append(bullet + indent.join(str(problem).splitlines()))
        if count > _MAX_SHOWN_PROBLEMS:
            lines.append(f"  and {count - _MAX_SHOWN_PROBLEMS} more, in VerificationError.problems")
        lines.append(f"to reproduce: {self.reproduce}")
        return "\n".join(lines)


def _join_quoted(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
