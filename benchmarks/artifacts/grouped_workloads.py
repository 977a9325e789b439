"""Runs of which the groups of ranks are counted."""

from __future__ import annotations

__all__ = ["GROUPED", "WORLD_SIZE"]

GROUPED = {
    "llama3 405B, FSDP 128 x TP 8": ("llama3", "llama3_405b"),
    "deepseek_v3 671B, PP 16 x EP 64": ("deepseek_v3", "deepseek_v3_671b_pp"),
}
"""Module and configuration by name; each on ``WORLD_SIZE`` ranks."""

WORLD_SIZE = 1024
