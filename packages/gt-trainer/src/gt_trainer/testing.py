"""What a process that tests the trainer on CPU loads, once.

Importing torchtitan's trainer costs a process seconds. A server that test workers are forked from
imports this module (``gt_trace.testing.GlooWorkers(preload=["gt_trainer.testing"])``).
"""

from __future__ import annotations

import importlib

from gt_trainer import device

__all__: list[str] = []

device.install("cpu")
for _name in ("trainer", "run", "models.llama3", "models.qwen3", "models.deepseek_v3"):
    importlib.import_module(f"gt_trainer.{_name}")
