"""Mode ``aot_joint`` of models that keep torchtitan's FlexAttention: bitwise eager on a CPU.

See ``flex_attention_cases.py`` for what runs there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from flex_attention.cases import own_flex_attention
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, Case, Comparison, compare_modes

from gt_trace.testing import GlooWorkers

FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}


def compare_joint(case: Case, folder: str, partitioner: str) -> Comparison:
    with own_flex_attention():
        return compare_modes(
            case, folder, mode="aot_joint", options={"joint_partitioner": partitioner}
        )


def check(found: list[Comparison]) -> None:
    for comparison in found:
        assert comparison.differences == ()
        assert len(set(comparison.losses)) == NUM_STEPS + NUM_UNSEEN_BATCHES
        assert comparison.num_captures == 1


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", ["min_cut", "save_all"])
@pytest.mark.parametrize("module", ["llama3", "deepseek_v3"])
def test_one_process_trains_as_eager_does(
    module: str, partitioner: str, one: GlooWorkers, tmp_path: Path
) -> None:
    case = Case(module=module, config=f"{module}_debugmodel")
    check(one.run(compare_joint, case, str(tmp_path), partitioner))


@pytest.mark.slow
def test_sharded_models_train_as_eager_ones_do(four: GlooWorkers, tmp_path: Path) -> None:
    case = Case(module="llama3", config="llama3_debugmodel", parallelism=FSDP_TP)
    check(four.run(compare_joint, case, str(tmp_path), "min_cut"))
