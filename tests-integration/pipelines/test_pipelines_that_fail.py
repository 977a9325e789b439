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
    ("rank", "action", "what"),
    [
        (0, "FORWARD", "gradients are not finite"),
        (2, "FULL_BACKWARD", "gradients are not finite"),
        # What the last stage returns is the loss, which no backward reads.
        (2, "FORWARD", "the loss is not finite"),
    ],
)
def test_what_is_no_number_in_one_microbatch_of_one_rank_ends_the_run_on_all(
    rank: int, action: PipelineAction, what: str, four: GlooWorkers, tmp_path: Path
):
    ended = four.run(poison_in, CASE, str(tmp_path), rank, action)
    check(ended)
    assert len({each.text for each in ended}) == 1, ended
    assert ended[0].text.startswith(f"step 1: {what} (NaN or infinite)")
    assert "Its update was not made, and nothing of this step was saved." in ended[0].text
