"""torchtitan's log, without the lines that tell a user of ``gt-train`` nothing.

torchtitan logs on the root logger. What another of our lines says better, what is about a default
that nobody chose, and what is the same in every run, is logged at DEBUG instead of its own level.
"""

from __future__ import annotations

import logging
import re

from torchtitan.tools.logging import init_logger

_SAYS_NOTHING = re.compile(
    "|".join(
        (
            r"\[GC\] ",
            r"Building \S+ \S+$",
            r"CPU capacity: ",
            r"CPU memory usage for model: ",
            r"Destroying the purge thread",
            r"Loading tokenizer from ",
            r"No checkpoint was provided",
            r"Peak FLOPS used for computing MFU: inf",
            r"Saving a full checkpoint at last step",
            r"Sleeping 2 seconds",
            r"Successfully created meshes",
            r"Synchronizing and adjusting timeout",
            r"Training completed",
            r"initial_load_model_only=True has no effect",  # it is the default
            r"model\.safetensors\.index\.json not found",
        )
    )
)


def start_logging() -> None:
    """Log to standard output, as torchtitan does."""
    logger = logging.getLogger()
    others = logger.handlers[:]
    init_logger()
    for handler in logger.handlers:
        if handler not in others:
            handler.addFilter(_demote)


def _demote(record: logging.LogRecord) -> bool:
    if _SAYS_NOTHING.match(record.getMessage()):
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return record.levelno >= logging.getLogger().level
