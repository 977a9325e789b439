"""Published runs beside the 18: they check the simulator.

One of them, 70B in bfloat16 with tensor parallelism, chose between two rates that are published of
the machine (docs/decisions/0066-accuracy.md); 70B in float8 is a run of the 18 once more. Nothing
was chosen by the others.

Two reports beside that of December 2024, of the same trainer: one on the same machine half a year
later, with tensor parallelism, one on another machine. What a row leaves open is set as for the
``published_runs``. Rows of the first report with a scale for each row are left out: it says itself
that their baseline was slow by a mistake (pytorch/torchtitan issue 1207).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gt_trainer.models.published_runs import (
    COMPILED,
    FLOAT8,
    PUBLISHED_RUNS,
    WHOLE_LOSS,
    PublishedRun,
)

_BENCHMARKS = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
_TENSOR_PARALLEL = f"{_BENCHMARKS}/asyncTP_llama3_h100_2025-06_torchtitan.md"
_H200 = f"{_BENCHMARKS}/llama3-8b_h200_202506_trainy-whitefiber.md"


def _tensor_parallel(
    config: str, world_size: int, batch: int, policy: str, *measured: tuple[str, float, float]
) -> tuple[PublishedRun, ...]:
    """A row of the report: a precision, without asynchronous tensor parallelism and with it."""
    size = config.removeprefix("llama3_")
    return tuple(
        PublishedRun(
            name=f"{config}_{world_size}_{precision}_{'async_tp' if is_async else 'tp'}",
            description=f"Llama 3.1 {size} on {world_size} H100: FSDP {world_size // 8}, TP 8, "
            f"torch.compile, {precision}{', async TP' if is_async else ''}",
            module="llama3",
            config=config,
            world_size=world_size,
            flags=(
                "--parallelism.tensor_parallel_degree",
                "8",
                "--compile.no_cuda_graphs",
                *WHOLE_LOSS,
                "--training.local_batch_size",
                str(batch),
                "--compile.memory_policy",
                policy,
                *COMPILED,
                *(FLOAT8 if precision == "float8" else ()),
                *(("--compile.async_tensor_parallel",) if is_async else ()),
            ),
            tokens_per_second_per_gpu=throughput,
            memory_gib=None,
            source=_TENSOR_PARALLEL,
        )
        for precision, *both in measured
        for is_async, throughput in zip((False, True), both, strict=True)
    )


def _on_h200(world_size: int, throughput: float, memory_gib: float) -> PublishedRun:
    return PublishedRun(
        name=f"llama3_8b_h200_{world_size}",
        description=f"Llama 3.1 8B on {world_size} H200: FSDP, torch.compile, Float8",
        module="llama3",
        config="llama3_8b",
        world_size=world_size,
        flags=PUBLISHED_RUNS["llama3_8b_8_fsdp_compiled_float8"].flags,
        tokens_per_second_per_gpu=throughput,
        memory_gib=memory_gib,
        source=_H200,
        hardware="h200",
    )


_RUNS = (
    *_tensor_parallel(
        "llama3_8b",
        64,
        12,
        "selective_alternate",
        ("bf16", 4378.0, 4809.4),
        ("float8", 5078.1, 5570.1),
    ),
    *_tensor_parallel(
        "llama3_70b", 256, 16, "full_recompute", ("bf16", 597.3, 652.4), ("float8", 809.8, 942.4)
    ),
    _on_h200(32, 10938, 47.96),
    _on_h200(64, 10753, 46.97),
)

HELD_OUT_RUNS: Mapping[str, PublishedRun] = MappingProxyType({run.name: run for run in _RUNS})
"""By name, in the order of the reports."""
