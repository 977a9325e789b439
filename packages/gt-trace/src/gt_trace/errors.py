"""The exceptions of gt-trace, drawn once.

    GtTraceError                      whatever this package raises on purpose
    ├── CaptureError                  the step cannot be captured as a pure graph of its inputs
    │   └── ConstantCapturedError     a tensor would be frozen into the graph as a constant
    ├── InputMismatchError            a call whose inputs are not those that were captured
    ├── StateMismatchError            a module whose state is not the one that was captured
    └── ArtifactError                 a stored capture cannot be written, or cannot be read here
        ├── ArtifactDamagedError      the file is not what was written
        └── ArtifactVersionError      the file is of another format

Each also derives from ``ValueError`` where the caller passed the wrong thing.
"""

from __future__ import annotations


class GtTraceError(Exception):
    """Base of every error that gt-trace raises on purpose."""


class CaptureError(GtTraceError, ValueError):
    """The step cannot be captured faithfully. The text lists every reason found."""


class ConstantCapturedError(CaptureError):
    """A tensor that is neither state nor argument would become a constant of the graph."""


class InputMismatchError(GtTraceError, ValueError):
    """A captured step was called with other inputs. The text lists every input that differs."""


class StateMismatchError(GtTraceError, ValueError):
    """A captured step was bound to a module with other parameters, buffers or layouts."""


class ArtifactError(GtTraceError):
    """A stored capture cannot be written, or cannot be read here."""


class ArtifactDamagedError(ArtifactError):
    """A file is no artifact, or not the one that was written: set it aside and capture again."""


class ArtifactVersionError(ArtifactError):
    """An artifact was written in another format than this gt-trace reads: capture again."""
