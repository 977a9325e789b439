"""FSDP stages on two ranks: gathered once, reduced once, and the bits of eager execution."""

from __future__ import annotations

from sharded_stages import evaluate_without_gathering_again, train_like_eager

from gt_trace.testing import GlooWorkers


def test_losses_and_gradients_are_those_of_one_reduction_a_step(two: GlooWorkers) -> None:
    for differing, num_owned in two.run(train_like_eager):
        assert differing == []
        assert num_owned == 6


def test_evaluation_reads_what_training_gathers(two: GlooWorkers) -> None:
    for same, error in two.run(evaluate_without_gathering_again):
        assert same
        assert error == (
            "stage 1 was asked for FORWARD without its parameters: call unshard before"
        )
