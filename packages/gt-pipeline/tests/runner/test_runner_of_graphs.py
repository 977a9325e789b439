"""Graph stages under the runner: every schedule on four ranks equals one eager process, to the bit.

One test a schedule, since capture is what takes time: evaluation before the first step, two steps,
and the chunks that were live in the second. Loaded stages, captured by another process, do the same.
"""

from __future__ import annotations

import pytest
import torch
from runner_cases import schedule, stage_documents, train_graphs
from torch import Tensor
from toy_pipeline import train_in_one_process

from gt_pipeline.schedules import SCHEDULE_NAMES, peak_live
from gt_trace.testing import GlooWorkers

# One with one stage a rank, one that splits the backward, one with pairs.
QUICK = ("1F1B", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in SCHEDULE_NAMES]
)
def test_graph_stages_compute_what_one_eager_process_computes(four: GlooWorkers, name: str) -> None:
    _check(name, four.run(train_graphs, name))


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_stages_that_another_process_captured_do_too(four: GlooWorkers, name: str) -> None:
    documents = stage_documents(schedule(name))
    _check(name, four.run(train_graphs, name, documents))


def _check(
    name: str, by_rank: list[tuple[list[Tensor], list[Tensor], dict[str, Tensor], int]]
) -> None:
    num_stages = schedule(name).num_stages
    before = train_in_one_process(num_stages, num_steps=1)
    expected = train_in_one_process(num_stages, num_steps=2)
    evaluated = [loss for losses, _, _, _ in by_rank for loss in losses]
    assert torch.equal(torch.stack(evaluated), torch.stack(before.losses))
    trained = [loss for _, losses, _, _ in by_rank for loss in losses]
    assert torch.equal(torch.stack(trained), torch.stack(expected.losses))
    gradients = {name: each for _, _, of_rank, _ in by_rank for name, each in of_rank.items()}
    assert gradients.keys() == expected.gradients.keys()
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, expected.gradients[parameter]), parameter
    assert tuple(peak for _, _, _, peak in by_rank) == peak_live(schedule(name))
