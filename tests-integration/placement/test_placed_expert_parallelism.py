"""Plans that distribute experts over ranks compute what the whole model computes on one.

Loss, every gradient and five optimizer steps, at float32 relative 1e-5 in norm. The exchanges of
tokens in the captured step are those that the plan predicted, by kind and axis; and, where routing
is forced to be balanced, as prices assume, a running step exchanges exactly the predicted bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from placement.cases import Found, PlacedCase, assert_agrees, compare_with_whole_model
from placement.placed_models import DEEPSEEK_V3, DEEPSEEK_V3_EP4, DEEPSEEK_V3_TP, QWEN3_MOE_EP4
from torch.distributed.tensor import Placement, Replicate, Shard
from training_cases import Case

from gt_config import AutoParallelConfig
from gt_trace.testing import GlooWorkers

NUM_EXCHANGES = 5
"""Of a layer and step: counts, tokens and results; and the gradients of both."""


def trained(case: PlacedCase, four: GlooWorkers, folder: Path) -> list[Found]:
    found = four.run(compare_with_whole_model, case, str(folder))
    assert_agrees(found, tolerance=1e-5)
    return found


def assert_tokens_travel(found: list[Found]) -> None:
    for each in found:
        assert each.expert_axes == {"ep"}
        assert each.num_exchanges == NUM_EXCHANGES


def assert_moves_what_was_predicted(found: list[Found]) -> None:
    for each in found:
        moved, predicted = each.all_to_all_bytes
        assert moved == predicted


def test_experts_on_the_ranks_of_one_axis_train_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    # Any plan of about the best price will do.
    case = PlacedCase(
        model=DEEPSEEK_V3_EP4,
        mode="none",
        options={"autoparallel_solver": AutoParallelConfig(relative_gap=0.03)},
        experts="expert_parallel",
        balanced_routing=True,
    )
    found = trained(case, four, tmp_path)
    assert_tokens_travel(found)
    assert_moves_what_was_predicted(found)


@pytest.mark.slow
def test_a_budget_that_gathered_experts_exceed_makes_tokens_travel(
    four: GlooWorkers, tmp_path: Path
) -> None:
    # Nobody asks for expert parallelism: nothing else is as cheap in 0.055 GiB. Captured, and routed
    # by the router.
    case = PlacedCase(model=DEEPSEEK_V3_EP4, memory_budget_gib=0.055)
    found = trained(case, four, tmp_path)
    assert_tokens_travel(found)
    assert found[0].num_sharded > 10


@pytest.mark.slow
def test_experts_that_run_again_in_their_backward_train_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    # Near the least that any plan takes, where the search is slow. What two layers of experts keep
    # counts, as one's own turn gains nothing by it.
    solver = AutoParallelConfig(relative_gap=0.1, time_limit_seconds=600)
    case = PlacedCase(
        model=replace(DEEPSEEK_V3_EP4, num_layers=3, seq_len=128),
        options={"autoparallel_solver": solver},
        memory_budget_gib=0.094,
        experts="expert_parallel",
        balanced_routing=True,
    )
    found = trained(case, four, tmp_path)
    for each in found:
        assert each.expert_axes == {"ep"}
        assert each.num_exchanges == 2 * (NUM_EXCHANGES + 2)  # the counts are known
        assert each.miscounted == ()
    assert_moves_what_was_predicted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(DEEPSEEK_V3, id="deepseek_v3-one-of-two-axes"),
        pytest.param(QWEN3_MOE_EP4, id="qwen3-one-axis"),
    ],
)
def test_distributed_experts_train_captured_like_the_whole_model(
    model: Case, four: GlooWorkers, tmp_path: Path
) -> None:
    case = PlacedCase(model=model, experts="expert_parallel", balanced_routing=True)
    found = trained(case, four, tmp_path)
    assert_tokens_travel(found)
    assert_moves_what_was_predicted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "cuts", "axes"),
    [
        (1, {Shard(1), Replicate()}, set()),
        (2, {Shard(0), Replicate()}, {"tp_in_ep"}),
        (4, {Shard(0)}, {"dp_shard_in_ep x tp_in_ep"}),
    ],
    ids=["features cut", "experts over these ranks", "experts over more"],
)
def test_experts_and_tensor_parallelism_train_like_the_whole_model(
    degree: int, cuts: set[Placement], axes: set[str], four: GlooWorkers, tmp_path: Path
) -> None:
    degrees = {**DEEPSEEK_V3_TP.parallelism, "expert_parallel_degree": degree}
    case = PlacedCase(
        model=replace(DEEPSEEK_V3_TP, parallelism=degrees),
        # Whole weights of all experts do not fit: without exchanges, ranks have parts of features.
        memory_budget_gib=0.08 if degree == 1 else None,
        experts="any" if degree == 1 else "expert_parallel",
        balanced_routing=True,
    )
    found = trained(case, four, tmp_path)
    for each in found:
        assert each.expert_axes == axes
        assert each.expert_weights == cuts
        assert each.num_sharded_experts == 3
        assert each.miscounted == ()
    if axes:
        assert_moves_what_was_predicted(found)


@pytest.mark.slow
def test_experts_whose_weights_are_gathered_train_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    # Replicated, parameters with gradients and optimizer state would take more than that.
    case = PlacedCase(
        model=DEEPSEEK_V3_EP4,
        memory_budget_gib=0.08,
        experts="own_tokens",
    )
    found = trained(case, four, tmp_path)
    assert found[0].expert_axes == set()
    assert found[0].num_sharded_experts == 3
