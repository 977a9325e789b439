"""Check of the texts in metadata of a stored graph, which FX and compilers show as comments."""

from __future__ import annotations

from typing import Any

from gt_trace.code_text import is_comment_text
from gt_trace.errors import ArtifactError

_INDUCTOR = "compile_with_inductor"
"""PyTorch's annotation of what Inductor compiles, which may hold options of Inductor."""

_OPTIONS = "inductor_configs"


def check_metadata_key(key: object) -> None:
    """Check the name of an item of metadata.

    Raises:
        ArtifactError: It is no printable text.
    """
    if type(key) is not str or not key.isprintable() or '"' in key:
        raise ArtifactError(f"an item of metadata is named {str(key)[:100]!r}")


def check_metadata(value: Any) -> None:
    """Check every text in an item of metadata, and what it tells a compiler.

    Options of Inductor may name programs to run, so that only numbers are stored.

    Raises:
        ArtifactError: A text would not stay a comment, or an option is no number.
    """
    if isinstance(value, str):
        if not is_comment_text(value):
            raise ArtifactError(f"a text of metadata has control characters: {value[:100]!r}")
    elif isinstance(value, dict):
        _check_options(value.get(_INDUCTOR))
        for key, each in value.items():
            check_metadata(key)
            check_metadata(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            check_metadata(each)


def _check_options(annotation: Any) -> None:
    options = annotation.get(_OPTIONS) if isinstance(annotation, dict) else None
    for name, option in (options or {}).items():
        if not isinstance(option, bool | int | float | None):
            raise ArtifactError(
                f"a node has Inductor's option {name}={option!r:.100}; a stored graph may have "
                "options that are numbers. Set it in the program instead (torch._inductor.config)"
            )
