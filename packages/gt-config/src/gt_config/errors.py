"""Every exception that gt-config raises on purpose, in one tree.

::

    Exception
    └── GtConfigError
        ├── ConfigError               (ValueError)  a configuration breaks a rule; all at once
        ├── SelectorSyntaxError       (ValueError)  a text is no MODULE_PATTERN::OP
        ├── FingerprintTypeError      (TypeError)   a value that has no canonical form
        ├── FingerprintDocumentError  (ValueError)  a stored fingerprint cannot be trusted
        ├── StaleFingerprintError     (ValueError)  stored and current fingerprints differ
        └── NodeMetadataError         (ValueError)  an annotation on a graph node is malformed
            └── NodeMetadataVersionError            it was written by another version

Each leaf is a ``ValueError`` or a ``TypeError`` too, so a caller that knows nothing of gt-config
still catches bad input the ordinary way. The errors survive pickling, because the processes of one
training job report them to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule: which flag, what it was, what is allowed, and what to do about it."""

    flag: str
    """The flag as it is typed on the command line, or "world size"."""

    value: object
    """The offending value, as it was given."""

    allowed: str
    """What would have been accepted, in words."""

    fix: str = "leave the flag out"
    """What to do, in words; it names flags and values."""

    def __str__(self) -> str:
        return f"{self.flag} is {self.value!r}\nallowed: {self.allowed}\nfix: {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDifference:
    """One field by which two fingerprints differ; values are in canonical text."""

    path: str
    """Where the field stands, as ``config.ep_overlap.num_chunks``."""

    before: str | None
    """Its value in the first fingerprint; None where it has no such field."""

    after: str | None
    """Its value in the second fingerprint; None where it has no such field."""

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.path}: added, {self.after}"
        if self.after is None:
            return f"{self.path}: removed, was {self.before}"
        return f"{self.path}: {self.before} became {self.after}"


class GtConfigError(Exception):
    """Base of every error that gt-config raises on purpose."""


class ConfigError(GtConfigError, ValueError):
    """A configuration breaks one or more rules; ``violations`` lists every one of them."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations: tuple[Violation, ...] = tuple(violations)
        super().__init__(self.violations)

    def __str__(self) -> str:
        return numbered_problems("the configuration", self.violations)


def numbered_problems(of: str, problems: Sequence[object]) -> str:
    """Return a heading and each problem with its number, further lines indented.

    Args:
        of: the part of a run that has the problems.
        problems: texts, or objects that print as such.
    """
    count = len(problems)
    lines = [f"{of} has {count} problem{'' if count == 1 else 's'}:"]
    for number, problem in enumerate(problems, start=1):
        bullet = f"  {number}. "
        lines.append(bullet + f"\n{' ' * len(bullet)}".join(str(problem).splitlines()))
    return "\n".join(lines)


class SelectorSyntaxError(GtConfigError, ValueError):
    """A text is not a ``MODULE_PATTERN::OP`` selector."""


class FingerprintTypeError(GtConfigError, TypeError):
    """A value somewhere in the fingerprinted data has no canonical form."""


class FingerprintDocumentError(GtConfigError, ValueError):
    """A stored fingerprint is malformed, of another format, or does not match its own digest."""


class StaleFingerprintError(GtConfigError, ValueError):
    """What was stored belongs to another configuration, model, batch or environment."""

    def __init__(self, differences: Iterable[FieldDifference]) -> None:
        self.differences: tuple[FieldDifference, ...] = tuple(differences)
        super().__init__(self.differences)

    def __str__(self) -> str:
        count = len(self.differences)
        head = f"stale: {count} field{'' if count == 1 else 's'} differ{'s' if count == 1 else ''}"
        return "\n  ".join(
            [f"{head} between what is stored and this run:", *map(str, self.differences)]
        )


class NodeMetadataError(GtConfigError, ValueError):
    """An annotation on a graph node is malformed."""


class NodeMetadataVersionError(NodeMetadataError):
    """An annotation on a graph node was written by another version of the key names."""

    def __init__(self, *, key: str, found: object, expected: int) -> None:
        self.key = key
        self.found = found
        self.expected = expected
        super().__init__(key, found, expected)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_version_error, (self.key, self.found, self.expected))

    def __str__(self) -> str:
        return (
            f"node metadata {self.key!r} has version {self.found!r}, and this gt-config reads "
            f"version {self.expected}: capture the graph again instead of loading it"
        )


def _rebuild_version_error(key: str, found: object, expected: int) -> NodeMetadataVersionError:
    return NodeMetadataVersionError(key=key, found=found, expected=expected)
