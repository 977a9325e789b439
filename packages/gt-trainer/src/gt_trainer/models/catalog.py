"""What ``gt-train`` can train: modules, their configurations, and where each is meant to run.

Plain data, free of torch, so that ``--help``, the check of a misspelled name and the plan of a dry
run need no import of torchtitan. Each entry names a function of ``gt_trainer.models.<module>`` that
returns the configuration; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One configuration."""

    module: str
    """Name given as ``--module``; the Python module is ``gt_trainer.models.<module>``."""

    config: str
    """Name given as ``--config``; the function in that Python module."""

    description: str
    """One line for people."""

    world_size: int
    """Ranks that the configuration's parallel degrees are meant for. Data parallelism takes up any
    other number that they divide."""

    is_large: bool = False
    """Whether a dry run takes minutes and gigabytes: 70 billion parameters and up."""


_ENTRIES = (
    CatalogEntry(
        module="llama3",
        config="llama3_debugmodel",
        description="Llama 3 in miniature: 6 layers, 6 million parameters. Trains on a laptop.",
        world_size=1,
    ),
    CatalogEntry(
        module="llama3",
        config="llama3_debugmodel_flex_attn",
        description="llama3_debugmodel by another name: FlexAttention on GPUs.",
        world_size=1,
    ),
    CatalogEntry(
        module="llama3",
        config="llama3_8b",
        description="Llama 3.1 8B on 8 GPUs: FSDP 4 x TP 2.",
        world_size=8,
    ),
    CatalogEntry(
        module="llama3",
        config="llama3_70b",
        description="Llama 3.1 70B on 256 GPUs: FSDP 32 x TP 8.",
        world_size=256,
        is_large=True,
    ),
    CatalogEntry(
        module="llama3",
        config="llama3_405b",
        description="Llama 3.1 405B on 1024 GPUs: FSDP 128 x TP 8.",
        world_size=1024,
        is_large=True,
    ),
    CatalogEntry(
        module="llama3",
        config="llama3_405b_pp",
        description="Llama 3.1 405B on 512 GPUs: FSDP 8 x TP 8 x PP 8.",
        world_size=512,
        is_large=True,
    ),
    CatalogEntry(
        module="qwen3",
        config="qwen3_debugmodel",
        description="Qwen3 in miniature, dense, with tied embeddings. Trains on a laptop.",
        world_size=1,
    ),
    CatalogEntry(
        module="qwen3",
        config="qwen3_moe_debugmodel",
        description="Qwen3 in miniature: 4 layers with 64 experts each. Trains on a laptop.",
        world_size=1,
    ),
    CatalogEntry(
        module="qwen3",
        config="qwen3_14b",
        description="Qwen3 14B on 8 GPUs: FSDP 8.",
        world_size=8,
    ),
    CatalogEntry(
        module="deepseek_v3",
        config="deepseek_v3_debugmodel",
        description="DeepSeek V3 in miniature: 6 layers, 8 experts. Trains on a laptop.",
        world_size=1,
    ),
    CatalogEntry(
        module="deepseek_v3",
        config="deepseek_v3_debugmodel_sdpa",
        description="deepseek_v3_debugmodel without FlexAttention on GPUs.",
        world_size=1,
    ),
    CatalogEntry(
        module="deepseek_v3",
        config="deepseek_v3_16b",
        description="DeepSeek V3 architecture with 16B parameters on 32 GPUs: FSDP 32, EP 32.",
        world_size=32,
    ),
    CatalogEntry(
        module="deepseek_v3",
        config="deepseek_v3_16b_sdpa",
        description="DeepSeek V3 16B without FlexAttention on 32 GPUs: FSDP 32, EP 32.",
        world_size=32,
    ),
    CatalogEntry(
        module="deepseek_v3",
        config="deepseek_v3_671b",
        description="DeepSeek V3 671B on 512 GPUs: FSDP 512, EP 64.",
        world_size=512,
        is_large=True,
    ),
    CatalogEntry(
        module="deepseek_v3",
        config="deepseek_v3_671b_pp",
        description="DeepSeek V3 671B on 2048 GPUs: FSDP 128 x PP 16, EP 64.",
        world_size=2048,
        is_large=True,
    ),
)


def _by_module() -> Mapping[str, Mapping[str, CatalogEntry]]:
    modules: dict[str, dict[str, CatalogEntry]] = {}
    for entry in _ENTRIES:
        modules.setdefault(entry.module, {})[entry.config] = entry
    return MappingProxyType({name: MappingProxyType(table) for name, table in modules.items()})


CATALOG = _by_module()
"""Module name to configuration name to entry, in the order in which ``--help`` lists them."""

INTENDED_WORLD_SIZE: Mapping[str, int] = MappingProxyType(
    {entry.config: entry.world_size for entry in _ENTRIES}
)
"""Configuration name to the number of ranks that it is meant for."""
