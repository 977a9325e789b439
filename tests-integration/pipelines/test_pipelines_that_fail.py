"""One rank goes wrong in a pipeline with expert-parallel groups: all ranks end, and say the same.

Ranks 0 and 1 have the first stage, 2 and 3 the second; each of a pair has half of the experts, and
waits for the other in exchanges of tokens over two groups.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pipelines.failure_cases import Ended, fail_in, poison_in
from pipelines.test_chunked_stages import BLOCKS, case_of

from gt_config.node_keys import PipelineAction
from gt_trace.testing import GlooWorkers

pytestmark = pytest.mark.slow
CASE = case_of(BLOCKS, "graph", "1F1B")
_SECONDS = 60.0
"""Far below the timeout of a group, far above what a slow machine takes."""


def check(ended: list[Ended]) -> None:
    assert all(each.text for each in ended)
    assert all(each.seconds < _SECONDS for each in ended)
    losses = [loss for each in ended for loss in each.losses_afterwards]
    assert len(losses) == 2 * CASE.num_microbatches
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("rank", "action", "where"),
    [(1, "FORWARD", "0F1 of stage 0"), (3, "FULL_BACKWARD", "1B1 of stage 1")],
)
def test_a_stage_that_fails_ends_those_that_wait_for_its_tokens(
    rank: int, action: PipelineAction, where: str, four: GlooWorkers, tmp_path: Path
):
    ended = four.run(fail_in, CASE, str(tmp_path), rank, action)
    check(ended)
    first = f"rank {rank} failed at {where}: OnPurposeError: on purpose\n"
    assert all(each.text.startswith(first) for each in ended), ended
    assert [each.num_gradients for each in ended] == [0] * 4


@pytest.mark.parametrize(
    ("rank", "action"),
    [
        pytest.param(
            0,
            "FORWARD",
            marks=pytest.mark.xfail(
                reason="seen once: a rank was in the norm of the next step's gradients when the "
                "others ended, and told of a closed connection",
                strict=False,
            ),
        ),
        (2, "FULL_BACKWARD"),
    ],
)
def test_what_is_no_number_in_one_microbatch_of_one_rank_ends_the_run_on_all(
    rank: int, action: PipelineAction, four: GlooWorkers, tmp_path: Path
):
    ended = four.run(poison_in, CASE, str(tmp_path), rank, action)
    check(ended)
    begins = "step 1: gradients are not finite (NaN or infinite). Their update was not made, and "
    assert all(each.text.startswith(begins) for each in ended), ended
