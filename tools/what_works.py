"""Writes docs/what-works-with-what.md: of each pair of features, whether a run may have both.

Nothing is claimed here: a small configuration with both is judged by the rules that judge every run
before it starts (``gt_trainer.preflight``), for any machine. Run it again when a rule changes:
``.venv/bin/python tools/what_works.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gt_trainer import device

device.install("cpu")

from gt_config.option_paths import with_option  # noqa: E402  # below, what imports torchtitan
from gt_trainer.models.deepseek_v3 import deepseek_v3_debugmodel  # noqa: E402
from gt_trainer.models.llama3 import llama3_debugmodel  # noqa: E402
from gt_trainer.preflight.preflight import configuration_violations  # noqa: E402
from gt_trainer.trainer import GraphTrainer  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "what-works-with-what.md"

_DENSE, _WITH_EXPERTS = llama3_debugmodel(), deepseek_v3_debugmodel()
_SHARD = {"parallelism.data_parallel_shard_degree": 2}
_EP = {**_SHARD, "parallelism.expert_parallel_degree": 2}
_TP = {"parallelism.tensor_parallel_degree": 2}
_OVERLAP = {
    **_EP,
    "compile.ep_overlap.enabled": True,
    "compile.ep_overlap.module_fqn": "layers.*.moe",
}
_PLANNED = {**_SHARD, "compile.autoparallel": True}
_INDUCTOR = "compile.inductor_compilation"
_POLICY = "compile.memory_policy"

FEATURES: Mapping[str, Mapping[str, object]] = {
    "FSDP": _SHARD,
    "HSDP": {**_SHARD, "parallelism.data_parallel_replicate_degree": 2},
    "TP": _TP,
    "EP": _EP,
    "PP": {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_microbatch_size": 2,  # of which EP overlap cuts chunks
    },
    "CP": {"parallelism.context_parallel_degree": 2},
    "aot_joint": {"compile.mode": "aot_joint"},
    "selective": {_POLICY: "selective"},
    "selective_alternate": {_POLICY: "selective_alternate"},
    "full_recompute": {_POLICY: "full_recompute"},
    "offload": {_POLICY: "offload"},
    "EP overlap, graph": {**_OVERLAP, "compile.ep_overlap.strategy": "graph"},
    "EP overlap, eager": {**_OVERLAP, "compile.ep_overlap.strategy": "eager"},
    "regional Inductor": {
        _INDUCTOR: "regional",
        "compile.regional_modules": ("layers.*.attention_norm",),
    },
    "full Inductor": {_INDUCTOR: "full"},
    "CUDA graphs": {"compile.cuda_graphs": True},
    "autoparallel": _PLANNED,
    "autoparallel_backend": {**_PLANNED, _INDUCTOR: "autoparallel_backend"},
    "second reduction group": {**_SHARD, "compile.fsdp_second_group": True},
    "reduce once": {**_SHARD, "compile.accumulation": "reduce_once"},
    "async TP": {**_TP, "compile.async_tensor_parallel": True},
    "stored graphs": {"compile.artifacts": "graphs"},
    "float8": {"quantization.linears": "float8_rowwise"},
}
"""What each asks for, with the least of what it cannot be without."""

_HEAD = """\
# What works with what

Written by `tools/what_works.py` from the rules that refuse a run before it starts; edit those.
**yes**: no rule refuses both together, of a small Llama 3, or with experts DeepSeek-V3. What only
GPUs can run ran on one, in parts. A number is the first reason why not, below, with all settings
that it refuses; **–**: two values of one option. Where a feature meets itself, it is alone. EP,
EP overlap, the second reduction group, reduce once and autoparallel are asked with FSDP over two
ranks, async TP with TP. Other models, and options that are not here, may have refusals of their
own.
"""


def configuration_of(settings: Mapping[str, object]) -> tuple[GraphTrainer.Config, int]:
    """A debug model that is trained so, and the number of ranks that it asks for."""
    has_experts = "parallelism.expert_parallel_degree" in settings
    config = _WITH_EXPERTS if has_experts else _DENSE
    compile_options = config.compile
    degrees: dict[str, Any] = {}
    quantization: dict[str, Any] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        if section == "compile":
            compile_options = with_option(compile_options, name, value)
        elif section == "quantization":
            quantization[name] = value
        else:
            degrees[name] = value
    config = replace(
        config,
        compile=compile_options,
        parallelism=replace(config.parallelism, **degrees),
        quantization=replace(config.quantization, **quantization),
        # Several microbatches a step, of whatever ranks there are.
        training=replace(config.training, local_batch_size=8, global_batch_size=8 * 8),
    )
    ranks = {name for name in degrees if name.endswith("_degree")} - {"expert_parallel_degree"}
    return config, math.prod(degrees[name] for name in ranks)


def contradict(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two features are two values of one option."""
    return any(one[path] != other[path] for path in one.keys() & other.keys())


def _reason(allowed: str) -> str:
    """Return what is allowed, in words that are the same for all options that one rule refuses."""
    for between in (", since ", " only with "):
        value, found, reason = allowed.partition(between)
        if found:
            kind = "the default" if value.startswith("its default") else "this"
            return f"{kind}{found}{reason}"
    return allowed


def page() -> str:
    """The whole of docs/what-works-with-what.md."""
    numbers: dict[str, int] = {}
    asked: dict[str, list[str]] = {}
    """The settings that each reason refuses."""

    def cell(one: Mapping[str, object], other: Mapping[str, object]) -> str:
        if contradict(one, other):
            return "–"
        found = next(configuration_violations(*configuration_of({**one, **other})), None)
        if found is None:
            return "yes"
        reason = _reason(found.allowed)
        setting = f"`{found.flag} {found.value}`"
        asked.setdefault(reason, [])
        if setting not in asked[reason]:
            asked[reason].append(setting)
        return str(numbers.setdefault(reason, len(numbers) + 1))

    rows = []
    for row, (name, one) in enumerate(FEATURES.items()):
        cells = [cell(one, other) for other in [*FEATURES.values()][: row + 1]]
        rows.append(f"| {' | '.join([f'**{name}**', *cells, *[''] * (len(FEATURES) - row - 1)])} |")
    table = [f"| | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|", *rows]
    listed = [
        f"{n}. {', '.join(asked[reason])}; allowed: {reason}" for reason, n in numbers.items()
    ]
    return "\n".join([_HEAD, *table, "", *listed, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
