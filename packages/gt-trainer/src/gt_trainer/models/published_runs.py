"""Runs whose throughput and memory somebody published, as command lines.

The 18 rows of torchtitan's report of December 2024: Llama 3.1 on 8 to 512 H100. Plain data, free of
torch, so that ``--help`` and the check of a misspelled name need no import of torchtitan.

What a row says is given as it says it. What it leaves open is set as torchtitan did at that time:
parameters gathered once a transformer block, one block ahead (FSDP2); "torch.compile" compiles each
block as a whole; "Float8" is one scale for each tensor, of all linear layers but the last; there
are as many microbatches as pipeline ranks; selective recomputation does every second matrix product
of a layer again, and the loss is taken of whole logits (torchtitan at 9dec370, the report's commit:
``torchtitan/parallelisms/parallelize_llama.py`` and ``train.py``). Nothing is chosen by what we
simulate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_SOURCE = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)

COMPILED: Final = ("--compile.inductor_compilation", "full")
_EAGER = ("--compile.inductor_compilation", "none")
FLOAT8: Final = ("--quantization.linears", "float8_tensorwise", "--quantization.skip", "lm_head")
_ASYNC_TP = ("--compile.async_tensor_parallel",)
WHOLE_LOSS: Final = ("--loss.num_chunks", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One measurement that somebody published, and how to repeat it."""

    name: str
    """Given as ``--published``."""

    description: str
    """What ran, for people."""

    module: str
    config: str
    world_size: int

    flags: tuple[str, ...]
    """Of the configuration, as typed."""

    positions: int | None = None
    """Up to which position the model is built, where a run is longer than the model was trained
    for; None leaves it as it is. Throughput does not ask what is learned."""

    tokens_per_second_per_gpu: float
    memory_gib: float | None
    """The largest over GPUs, as reserved by PyTorch's allocator; None where nobody said."""

    source: str
    """Address and table."""

    hardware: str = "h100_hbm2e_500w"
    """Name of the machine's data in gt_passes."""


def _positions(thousands: int) -> int | None:
    """Llama 3.1 reaches 128k tokens."""
    return thousands * 1024 if thousands > 128 else None


def _of_8b(
    table: int,
    name: str,
    description: str,
    *flags: str,
    world_size: int,
    positions: int | None = None,
    tokens_per_second_per_gpu: float,
    memory_gib: float,
) -> PublishedRun:
    return PublishedRun(
        name=f"llama3_8b_{name}",
        description=f"Llama 3.1 8B on {world_size} H100: {description}",
        module="llama3",
        config="llama3_8b",
        world_size=world_size,
        flags=(
            "--parallelism.tensor_parallel_degree",
            "1",
            "--compile.no_cuda_graphs",
            *WHOLE_LOSS,
            *flags,
        ),
        positions=positions,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        memory_gib=memory_gib,
        source=f"{_SOURCE}, table {table}",
    )


def _fsdp_of_8b(
    table: int, world_size: int, *measured: tuple[float, float]
) -> tuple[PublishedRun, ...]:
    batch = ("--training.local_batch_size", "2", "--compile.memory_policy", "selective_alternate")
    variants = (
        ("fsdp", "FSDP", _EAGER),
        ("fsdp_compiled", "FSDP, torch.compile", COMPILED),
        ("fsdp_compiled_float8", "FSDP, torch.compile, Float8", (*COMPILED, *FLOAT8)),
    )
    return tuple(
        _of_8b(
            table,
            f"{world_size}_{name}",
            description,
            *batch,
            *flags,
            world_size=world_size,
            tokens_per_second_per_gpu=throughput,
            memory_gib=memory_gib,
        )
        for (name, description, flags), (throughput, memory_gib) in zip(
            variants, measured, strict=True
        )
    )


def _long_8b(
    context_parallel: int, thousands: int, throughput: float, memory_gib: float
) -> PublishedRun:
    return _of_8b(
        2,
        f"{thousands}k",
        f"{thousands}k tokens, FSDP {8 // context_parallel}, CP {context_parallel}, torch.compile, "
        "Float8",
        "--training.local_batch_size",
        "1",
        "--training.seq_len",
        str(thousands * 1024),
        "--parallelism.context_parallel_degree",
        str(context_parallel),
        "--compile.memory_policy",
        "full_recompute",
        *COMPILED,
        *FLOAT8,
        world_size=8,
        positions=_positions(thousands),
        tokens_per_second_per_gpu=throughput,
        memory_gib=memory_gib,
    )


def _of_70b(
    name: str, description: str, *flags: str, throughput: float, memory_gib: float
) -> PublishedRun:
    return PublishedRun(
        name=f"llama3_70b_{name}",
        description=f"Llama 3.1 70B on 256 H100: FSDP 32, TP 8, torch.compile, Float8{description}",
        module="llama3",
        config="llama3_70b",
        world_size=256,
        flags=(
            "--compile.no_cuda_graphs",
            *WHOLE_LOSS,
            "--training.local_batch_size",
            "16",
            "--compile.memory_policy",
            "full_recompute",
            *COMPILED,
            *FLOAT8,
            *flags,
        ),
        tokens_per_second_per_gpu=throughput,
        memory_gib=memory_gib,
        source=f"{_SOURCE}, table 4",
    )


def _of_405b(
    table: int,
    name: str,
    description: str,
    *flags: str,
    batch: int,
    positions: int | None = None,
    throughput: float,
    memory_gib: float,
) -> PublishedRun:
    return PublishedRun(
        name=f"llama3_405b_{name}",
        description=f"Llama 3.1 405B on 512 H100: {description}, TP 8, PP 8, torch.compile, "
        "Float8, async TP",
        module="llama3",
        config="llama3_405b_pp",
        world_size=512,
        flags=(
            "--compile.no_cuda_graphs",
            "--compile.memory_policy",
            "full_recompute",
            *COMPILED,
            *FLOAT8,
            *_ASYNC_TP,
            "--training.local_batch_size",
            str(batch),
            "--parallelism.pipeline_parallel_microbatch_size",
            str(batch // 8),
            *flags,
        ),
        positions=positions,
        tokens_per_second_per_gpu=throughput,
        memory_gib=memory_gib,
        source=f"{_SOURCE}, table {table}",
    )


def _long_405b(
    context_parallel: int, thousands: int, throughput: float, memory_gib: float
) -> PublishedRun:
    return _of_405b(
        6,
        f"{thousands}k",
        f"1F1B, {thousands}k tokens, FSDP {8 // context_parallel}, CP {context_parallel}",
        "--parallelism.pipeline_parallel_schedule",
        "1F1B",
        "--training.seq_len",
        str(thousands * 1024),
        "--parallelism.context_parallel_degree",
        str(context_parallel),
        batch=8,
        positions=_positions(thousands),
        throughput=throughput,
        memory_gib=memory_gib,
    )


_RUNS = (
    *_fsdp_of_8b(1, 8, (5762, 82.4), (6667, 77.0), (8532, 76.8)),
    _long_8b(1, 32, 3890, 83.9),
    _long_8b(2, 64, 2540, 84.2),
    _long_8b(4, 128, 1071, 84.0),
    _long_8b(8, 256, 548, 84.5),
    *_fsdp_of_8b(3, 128, (5605, 67.0), (6514, 62.0), (8380, 61.8)),
    _of_70b("fsdp_tp", "", throughput=829, memory_gib=71.9),
    _of_70b("fsdp_async_tp", ", async TP", *_ASYNC_TP, throughput=876, memory_gib=67.6),
    _of_405b(
        5,
        "1f1b",
        "1F1B, FSDP 8",
        "--parallelism.pipeline_parallel_schedule",
        "1F1B",
        batch=32,
        throughput=100,
        memory_gib=82.5,
    ),
    _of_405b(
        5, "interleaved", "interleaved 1F1B, FSDP 8", batch=32, throughput=128, memory_gib=72.7
    ),
    _long_405b(1, 32, 76, 75.3),
    _long_405b(2, 64, 47, 75.9),
    _long_405b(4, 128, 31, 77.1),
    _long_405b(8, 256, 16, 84.9),
)

PUBLISHED_RUNS: Mapping[str, PublishedRun] = MappingProxyType({run.name: run for run in _RUNS})
"""Published runs by name, in the order of the report's tables 1, 2, 3, 4, 5 and 6."""
