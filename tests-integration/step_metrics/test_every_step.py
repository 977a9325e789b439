"""Steps that are not reported are on record all the same, and cost no wait for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_metrics.cases import (
    poisoned,
    records_of,
    scalar_reads_by_step,
    waits_of_a_late_device,
)
from training_cases import NUM_STEPS, Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(module="llama3", config="llama3_debugmodel", num_layers=1)
ON_FOUR = Case(
    module="llama3",
    config="llama3_debugmodel",
    num_layers=1,
    parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    gradient_accumulation_steps=2,
)


def test_record_of_every_step_is_the_same_however_often_steps_are_reported(
    four: GlooWorkers, tmp_path: Path
) -> None:
    each = four.run(records_of, ON_FOUR, str(tmp_path / "each"), 1)[0]
    some = four.run(records_of, ON_FOUR, str(tmp_path / "some"), 3)[0]
    assert [record["step"] for record in some] == [*range(1, NUM_STEPS + 1)]
    assert all({"loss", "grad_norm", "max_loss", "lr", "n_tokens_seen"} <= set(r) for r in some)
    assert some == each


@pytest.mark.parametrize("mode", ["none", "aot_fx_trace"])
def test_step_that_is_not_reported_reads_no_number_off_a_tensor(
    mode: str, one: GlooWorkers, tmp_path: Path
) -> None:
    (reads,) = one.run(scalar_reads_by_step, LLAMA3, str(tmp_path), 10, mode)
    assert reads == {2: 0, 3: 0, 4: 0}


def test_only_reported_steps_wait_for_a_device_that_is_a_step_behind(
    one: GlooWorkers, tmp_path: Path
) -> None:
    (waits,) = one.run(waits_of_a_late_device, LLAMA3, str(tmp_path), 3)
    # For the verdict on the gradients of the step, and for its metrics.
    assert waits == [2, 0, 2, 0]


@pytest.mark.parametrize("interval", [1, 3])
def test_step_whose_gradients_are_not_finite_is_not_saved_by_a_late_device(
    interval: int, one: GlooWorkers, tmp_path: Path
) -> None:
    ((message, saved, steps),) = one.run(poisoned, LLAMA3, str(tmp_path), 3, True, interval)
    assert message.startswith(
        "step 3: gradients are not finite (NaN or infinite). Nothing of this step was saved.\n"
    )
    assert saved == (["step-1", "step-2"] if interval == 1 else [])
    assert steps[:2] == [1, 2]


@pytest.mark.parametrize("is_late", [True, False])
def test_step_between_reports_whose_loss_is_not_finite_is_not_saved(
    is_late: bool, one: GlooWorkers, tmp_path: Path
) -> None:
    ((message, saved, _),) = one.run(poisoned, LLAMA3, str(tmp_path), 3, is_late, 1, "loss")
    fate = "Nothing" if is_late else "Its update was not made, and nothing"
    assert message == (
        "step 3: the loss is not finite (NaN or infinite), though its gradients are. "
        f"{fate} of this step was saved."
    )
    assert saved == ["step-1", "step-2"]


@pytest.mark.parametrize("is_late", [True, False])
def test_last_step_whose_gradients_are_not_finite_ends_all_ranks_without_a_checkpoint(
    is_late: bool, four: GlooWorkers, tmp_path: Path
) -> None:
    answers = four.run(poisoned, ON_FOUR, str(tmp_path), NUM_STEPS, is_late)
    fate = "Nothing" if is_late else "Its update was not made, and nothing"
    for message, saved, _ in answers:
        assert message.startswith(
            f"step {NUM_STEPS}: gradients are not finite (NaN or infinite). {fate} of this step"
        )
        assert saved == []
    assert answers[0][2][: NUM_STEPS - 1] == [*range(1, NUM_STEPS)]
