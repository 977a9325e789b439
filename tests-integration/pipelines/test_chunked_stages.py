"""EP overlap in pipeline stages: the bits of eager stages in chunks, whoever makes the chunks.

Three runs as in ``test_pipelined_training.py``. The captured stages make chunks before their trace
or on their graph; the whole model and the stages of PyTorch's runtime run in chunks eagerly.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from chunks.recorded_routing import Load
from pipelines.cases import Found, PipelineCase, compare_pipelines
from training_cases import Case

from gt_config import EpOverlapConfig
from gt_trace.testing import GlooWorkers

DEEPSEEK_V3 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    num_layers=4,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
)
BLOCKS = EpOverlapConfig(enabled=True, module_fqn="layers.*", chunk_dim="batch")
MOES = EpOverlapConfig(enabled=True, module_fqn="layers.*.moe", chunk_dim="batch")
BY_SEQUENCE = EpOverlapConfig(enabled=True, module_fqn="layers.*.moe", chunk_dim="seq")
OVERLAPS = {"blocks": BLOCKS, "moe": MOES, "moe, sequence": BY_SEQUENCE}


def case_of(
    overlap: EpOverlapConfig,
    strategy: str,
    schedule: str,
    *,
    load: Load | None = None,
    **options: Any,
) -> PipelineCase:
    asked: Any = {"strategy": strategy, "disable_early_grad_accumulation": strategy == "graph"}
    return PipelineCase(
        model=DEEPSEEK_V3,
        schedule=schedule,
        microbatch_size=1 if overlap.chunk_dim == "seq" else 2,
        overlap=dataclasses.replace(overlap, **asked),
        load=load,
        options=options,
    )


def slow(name: str, *args: Any, **options: Any) -> Any:
    return pytest.param(case_of(*args, **options), id=name, marks=pytest.mark.slow)


CASES = [
    pytest.param(case_of(BLOCKS, "graph", "DualPipeV"), id="graph, blocks-DualPipeV"),
    *(
        slow(f"{strategy}, {name}-{schedule}", OVERLAPS[name], strategy, schedule)
        for strategy in ("eager", "graph")
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
        for name in ("blocks", "moe, sequence")
        if (strategy, name, schedule) != ("graph", "blocks", "DualPipeV")
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_eager_stages_in_the_same_chunks(
    case: PipelineCase, four: GlooWorkers, tmp_path: Path
):
    check(case, four.run(compare_pipelines, case, str(tmp_path)))


def check(case: PipelineCase, found: list[Found]) -> None:
    assert [each.differences for each in found] == [()] * len(found)
    assert all(each.num_gradients > 10 for each in found)
    assert {len(each.losses) for each in found} == {0, 2 * 2 * case.num_microbatches}
    for each in found:
        print(each.exchanges)
