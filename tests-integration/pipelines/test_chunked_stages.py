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
from pipelines.cases import (
    FEW_BATCHES,
    Found,
    PipelineCase,
    compare_pipelines,
)
from pipelines.exchanges import Exchanges
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
WITH_TP = dataclasses.replace(
    DEEPSEEK_V3, parallelism={"tensor_parallel_degree": 2, "expert_parallel_degree": 2}
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
    model: Case = DEEPSEEK_V3,
    **options: Any,
) -> PipelineCase:
    asked: Any = {"strategy": strategy, "disable_early_grad_accumulation": strategy == "graph"}
    return PipelineCase(
        model=model,
        schedule=schedule,
        microbatch_size=1 if overlap.chunk_dim == "seq" else 2,
        overlap=dataclasses.replace(overlap, **asked),
        load=load,
        options=options,
    )


def slow(name: str, *args: Any, **options: Any) -> Any:
    return pytest.param(case_of(*args, **options), id=name, marks=pytest.mark.slow)


CASES = [
    pytest.param(
        dataclasses.replace(case_of(BLOCKS, "graph", "DualPipeV"), num_batches=FEW_BATCHES),
        id="graph, blocks-DualPipeV, quick",
    ),
    *(
        slow(f"{strategy}, {name}-{schedule}", OVERLAPS[name], strategy, schedule)
        for strategy in ("eager", "graph")
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
        for name in ("blocks", "moe, sequence")
    ),
    slow("graph, moe-ZBVZeroBubble", MOES, "graph", "ZBVZeroBubble"),
    *(
        slow(
            f"{strategy}, blocks-DualPipeV, {policy}",
            BLOCKS,
            strategy,
            "DualPipeV",
            memory_policy=policy,
        )
        for strategy, policy in (
            ("graph", "full_recompute"),
            ("eager", "selective"),
            ("eager", "selective_alternate"),
        )
    ),
    *(
        slow(f"{strategy}, blocks-DualPipeV, {load}", BLOCKS, strategy, "DualPipeV", load=load)
        for strategy, load in (("graph", "a rank without tokens"), ("eager", "uneven"))
    ),
    *(
        slow(f"{strategy}, blocks-DualPipeV, TP 2", BLOCKS, strategy, "DualPipeV", model=WITH_TP)
        for strategy in ("eager", "graph")
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
    assert {len(each.losses) for each in found} == {0, 2 * case.num_batches * case.num_microbatches}
    exchanges = [exchanges for each in found for exchanges in each.exchanges]
    recomputes = case.options.get("memory_policy") == "full_recompute"
    check_exchanges(exchanges, {"forward": 4, "backward": 8 if recomputes else 4})
    root = case.overlap.module_fqn.replace("*", "{}")
    first = 1 if root.endswith("moe") else 0  # the first layer has no experts
    roots = {root.format(number) for number in range(first, case.model.num_layers)}
    for action, direction in (("FORWARD", "forward"), ("FULL_BACKWARD", "backward")):
        regions = {region for each in exchanges if each.action == action for region in each.regions}
        assert regions == {(root, direction) for root in roots}
    assert any(" with " in each.action for each in exchanges) == (case.schedule == "DualPipeV")


def check_exchanges(exchanges: list[Exchanges], num_of: dict[str, int]) -> None:
    """Every chunk sends its tokens there and back, each way, and behind each of them another works.

    ::

        network           [= dispatch 0 =][= dispatch 1 =][= combine 0 =][= combine 1 =]
        compute  route 0   route 1         experts 0       experts 1      join 0

    Weights' gradients exchange nothing. The first stage has no gradient to send on, so that its
    whole backward is of weights. ``num_of`` is for one layer, by direction.
    """
    for each in exchanges:
        assert each.exposed == (), each
        assert all(each.behind), each
        num = sum(num_of[way] for root, way in each.regions if root.split(".")[1] != "0")
        only_weights = each.action == "BACKWARD_WEIGHT" and each.stage_index > 0
        assert len(each.behind) == (0 if only_weights else num), each
