"""transformers builds what was exported from its folder alone, and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.export_cases import export, sigmoid_routing, without_bias
from training_cases import Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(module="llama3", config="llama3_debugmodel")
QWEN3_TIED = Case(module="qwen3", config="qwen3_debugmodel")
QWEN3_MOE = Case(module="qwen3", config="qwen3_moe_debugmodel")
DEEPSEEK_V3 = Case(module="deepseek_v3", config="deepseek_v3_debugmodel", num_layers=3)

FILES = (
    "checksums.json",
    "config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.mark.parametrize(
    ("case", "change", "model"),
    [
        pytest.param(LLAMA3, None, "LlamaForCausalLM", id="llama3"),
        pytest.param(
            QWEN3_TIED, None, "Qwen3ForCausalLM", id="qwen3, tied weights", marks=pytest.mark.slow
        ),
        pytest.param(
            QWEN3_MOE,
            without_bias,
            "Qwen3MoeForCausalLM",
            id="qwen3 with experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(DEEPSEEK_V3, sigmoid_routing, "DeepseekV3ForCausalLM", id="deepseek_v3"),
    ],
)
def test_transformers_computes_the_same_logits(
    case: Case, change: object, model: str, one: GlooWorkers, tmp_path: Path
) -> None:
    options = () if change is None else (change,)
    (found,) = one.run(export, case, str(tmp_path), *options)
    assert found.model == model
    assert found.largest_difference < 1e-5
    assert found.files == FILES
    assert found.num_tokens == 2048


@pytest.mark.slow
def test_sharded_weights_are_exported_once(four: GlooWorkers, tmp_path: Path) -> None:
    case = Case(
        module="llama3",
        config="llama3_debugmodel",
        parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    )
    found, *others = four.run(export, case, str(tmp_path))
    assert others == [None] * 3
    assert found.largest_difference < 1e-5
    assert found.files == FILES
