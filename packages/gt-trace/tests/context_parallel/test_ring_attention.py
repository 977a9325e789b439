"""Keys and values that go around, and the sums of their gradients behind them."""

from __future__ import annotations

import pytest
from sequence_cases import compare_ring, order_of_a_ring

from gt_trace.testing import GlooWorkers


def _check(workers: GlooWorkers) -> None:
    for found in workers.run(compare_ring):
        # The same function: in float64 nothing but rounding is left.
        assert found.in_float64 < 1e-13
        # In float32 both round; neither is the reference.
        assert found.apart < 1e-6
        assert found.ring < 2 * found.gathered
        assert found.is_repeatable


def test_a_ring_of_two_finds_what_gathered_keys_would_and_repeats_its_bits(
    two: GlooWorkers,
) -> None:
    _check(two)


@pytest.mark.slow
def test_so_does_a_ring_of_four(four: GlooWorkers) -> None:
    _check(four)


def test_every_send_is_launched_before_a_block_and_waited_for_after_it(two: GlooWorkers) -> None:
    for found in two.run(order_of_a_ring):
        assert found == [
            "forward: pass_on",
            "forward: attend",
            "forward: wait for pass_on",
            "forward: attend",
            "backward: pass_on",
            "backward: attend",
            "backward: pass_on_grad",
            "backward: wait for pass_on",
            "backward: attend",
            "backward: wait for pass_on_grad",
            "backward: pass_on_grad",
            "backward: wait for pass_on_grad",
        ]
