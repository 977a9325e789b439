"""One rank goes wrong in a pipeline with groups inside of stages: all ranks end, and say the same.

Ranks 0 and 1 have the first stage, 2 and 3 the second. Each of a pair has half of the experts, and
waits for the other in exchanges of tokens over two groups; also with half of each sequence, and of
what is not experts, where it waits in the collectives of tensor parallelism.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from pathlib import Path

import pytest
from pipelines.cases import PipelineCase
from pipelines.failure_cases import Ended, die_in, fail_in, poison_in
from pipelines.test_chunked_stages import BLOCKS, WITH_TP, case_of

from gt_config.node_keys import PipelineAction
from gt_trace.testing import GlooWorkers

pytestmark = pytest.mark.slow
EP = case_of(BLOCKS, "graph", "1F1B")
EP_AND_TP = case_of(BLOCKS, "graph", "1F1B", model=WITH_TP)
_SECONDS = 60.0
"""Far below the timeout of a group, far above what a slow machine takes."""


def check(ended: list[Ended]) -> None:
    assert all(each.text for each in ended)
    assert all(each.seconds < _SECONDS for each in ended)
    losses = [loss for each in ended for loss in each.losses_afterwards]
    assert len(losses) == 2 * EP.num_microbatches
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("case", "rank", "action", "where"),
    [
        pytest.param(EP, 1, "FORWARD", "0F1 of stage 0", id="EP, forward"),
        pytest.param(EP, 3, "FULL_BACKWARD", "1B1 of stage 1", id="EP, backward"),
        pytest.param(EP_AND_TP, 2, "FORWARD", "1F1 of stage 1", id="EP and TP, forward"),
        pytest.param(EP_AND_TP, 0, "FULL_BACKWARD", "0B1 of stage 0", id="EP and TP, backward"),
    ],
)
def test_a_stage_that_fails_ends_those_that_wait_for_its_tokens(
    case: PipelineCase,
    rank: int,
    action: PipelineAction,
    where: str,
    four: GlooWorkers,
    tmp_path: Path,
):
    ended = four.run(fail_in, case, str(tmp_path), rank, action)
    check(ended)
    first = f"rank {rank} failed at {where}: OnPurposeError: on purpose\n"
    assert all(each.text.startswith(first) for each in ended), ended
    assert [each.num_gradients for each in ended] == [0] * 4


@pytest.mark.parametrize(
    ("case", "rank", "action", "what"),
    [
        pytest.param(EP, 0, "FORWARD", "gradients are not finite", id="EP, forward"),
        pytest.param(EP, 2, "FULL_BACKWARD", "gradients are not finite", id="EP, backward"),
        # What the last stage returns is the loss, which no backward reads.
        pytest.param(EP, 2, "FORWARD", "the loss is not finite", id="EP, loss"),
        pytest.param(EP_AND_TP, 1, "FORWARD", "gradients are not finite", id="EP and TP, forward"),
        pytest.param(EP_AND_TP, 3, "FORWARD", "the loss is not finite", id="EP and TP, loss"),
    ],
)
def test_what_is_no_number_in_one_microbatch_of_one_rank_ends_the_run_on_all(
    case: PipelineCase,
    rank: int,
    action: PipelineAction,
    what: str,
    four: GlooWorkers,
    tmp_path: Path,
):
    ended = four.run(poison_in, case, str(tmp_path), rank, action)
    check(ended)
    assert len({each.text for each in ended}) == 1, ended
    assert ended[0].text.startswith(f"step 1: {what} (NaN or infinite)")
    assert "Its update was not made, and nothing of this step was saved." in ended[0].text


@pytest.mark.parametrize(
    ("case", "dying", "action"),
    [
        pytest.param(EP, 3, "FULL_BACKWARD", id="EP, backward"),
        pytest.param(EP_AND_TP, 0, "FORWARD", id="EP and TP, forward"),
    ],
)
def test_a_rank_that_is_killed_ends_those_that_wait_for_it(
    case: PipelineCase, dying: int, action: PipelineAction, tmp_path: Path
):
    context = multiprocessing.get_context("forkserver")
    # Of whoever starts it first, this test or a pool of workers.
    context.set_forkserver_preload(["gt_trace.testing", "gt_trainer.testing"])
    store = str(tmp_path / "store")
    processes = [
        context.Process(target=die_in, args=(case, str(tmp_path), dying, action, rank, store))
        for rank in range(4)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 500
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hung
    for rank in {*range(4)} - {dying}:
        ended = Ended(**json.loads((tmp_path / f"rank {rank}").read_text()))
        assert ended.text.startswith("rank ")
        assert " failed at " in ended.text
        assert ended.seconds < _SECONDS
        assert ended.num_gradients == 0
    assert not (tmp_path / f"rank {dying}").exists()
