"""Short names of the flags that people change most."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "--steps": "--training.steps",
        "--lr": "--optimizer.param_groups.0.optimizer_kwargs.lr",
        "--batch": "--training.local_batch_size",
        "--seq-len": "--training.seq_len",
    }
)
"""The flags by their short names, as the help shows them."""


def written_out(argument: str) -> str:
    """Return an argument with the whole name of its flag; another one as it is.

    Args:
        argument: As typed: a flag, a flag with ``=`` and its value, or a value.
    """
    name, has_value, value = argument.partition("=")
    return SHORT_NAMES.get(name.replace("_", "-"), name) + has_value + value
