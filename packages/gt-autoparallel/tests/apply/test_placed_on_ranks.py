"""Placed models on four ranks compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from placed_checkpoints import differences_after_loading
from placed_flex_attention import compare_random_plans_of_attention
from placed_hugging_face import compare_hugging_face
from placed_model_cases import compare_random_plans

from gt_trace.testing import GlooWorkers

_PRELOAD = [
    "gt_autoparallel.apply",
    "gt_autoparallel.find",
    "gt_autoparallel.graph.capture",
    "transformers.models.gpt2.modeling_gpt2",
]
"""Imported once for all workers."""


@pytest.fixture(scope="module")
def four() -> Iterator[GlooWorkers]:
    with GlooWorkers(4, timeout=600, preload=_PRELOAD) as workers:
        yield workers


@pytest.mark.parametrize(
    "seeds", [[0], pytest.param([1, 2, 3, 4, 5, 6], marks=pytest.mark.slow)], ids=str
)
def test_random_plans_compute_outputs_and_gradients_of_one_process(
    seeds: list[int], four: GlooWorkers
) -> None:
    assert four.run(compare_random_plans, seeds) == [[]] * 4


@pytest.mark.parametrize(
    "seeds", [[0, 1], pytest.param([*range(2, 22)], marks=pytest.mark.slow)], ids=len
)
def test_random_plans_with_flex_attention_compute_what_one_process_computes(
    seeds: list[int], four: GlooWorkers
) -> None:
    results = four.run(compare_random_plans_of_attention, seeds)
    assert [found.problems for found in results] == [()] * 4
    assert results[0].num_run_again > 0
    if len(seeds) > 10:
        # Cut along samples, heads, both, and heads of which two ranks share one of the keys.
        assert {"S(0) S(1) S(0) S(1)", "S(1) S(1) S(1) R"} <= results[0].ways


def test_a_checkpoint_is_loaded_under_another_plan_and_under_none(
    four: GlooWorkers, tmp_path: Path
) -> None:
    assert four.run(differences_after_loading, str(tmp_path), (0, 1)) == [[]] * 4


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen2", "bert", "qwen2_moe", "vit", "t5", "whisper")
        ),
    ],
)
def test_planned_models_of_transformers_train_like_the_whole_model(
    name: str, four: GlooWorkers
) -> None:
    for each in four.run(compare_hugging_face, name):
        for loss, expected in each.losses:
            assert loss == pytest.approx(expected, rel=1e-5)
        assert each.worst_gradient[0] < 1e-5, each.worst_gradient
        assert each.worst_parameter[0] < 1e-5, each.worst_parameter
        assert each.num_sharded > 10
        assert each.unpredicted == {}
        # Why some are not trained with Adam here: of this gradient there is nothing but rounding.
        assert each.key_bias_share < 1e-6
