"""Stages with FlexAttention: cut, split backward, and pairs; the bits of eager execution.

In one process in the regions that are compiled on a GPU, on several ranks as captured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from flex_stages import (
    LENGTH,
    MICROBATCH_SIZE,
    NUM_MICROBATCHES,
    WIDTH,
    Attention,
    batch,
    captured,
    causal,
    first_microbatch,
    mask_of,
    modules,
    outline_attention,
    step,
    taken_gradients,
    train_eagerly,
    train_pipeline,
    train_sharded,
)
from stage_models import random_inputs, run_joint, run_recomposed, same_bits
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import create_block_mask

from gt_pipeline.errors import StageInputError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.runner import MicrobatchInputs
from gt_pipeline.schedules import schedule_of
from gt_trace import flex_attention_on_cpu
from gt_trace.testing import GlooWorkers


@pytest.fixture(scope="module", autouse=True)
def cpu_trains() -> Iterator[None]:
    with flex_attention_on_cpu():
        yield


@pytest.fixture(scope="module")
def parts() -> list[Attention]:
    return modules(2)


@pytest.fixture(scope="module")
def stages(cpu_trains: None, parts: list[Attention]) -> list[GraphPipelineStage]:
    return captured(parts, [0, 1], transform=outline_attention)


def operators(action: ActionGraph | None) -> list[str]:
    assert action is not None
    calls = action.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention
    ) + action.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention_backward
    )
    return [str(node.target) for node in calls]


def test_what_the_stage_before_waits_for_has_attentions_backward_and_the_rest_has_not(
    stages: list[GraphPipelineStage],
) -> None:
    graphs = stages[1].graphs
    assert operators(graphs.forward) == ["flex_attention"]
    assert operators(graphs.full_backward) == ["flex_attention_backward"]
    assert operators(graphs.backward_input) == ["flex_attention_backward"]
    assert operators(graphs.backward_weight) == []
    assert graphs.backward_weight is not None
    products = graphs.backward_weight.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.mm.default
    )
    assert len(products) == 2  # of the two weights


def test_the_graphs_of_actions_compute_what_the_joint_graph_does(
    stages: list[GraphPipelineStage],
) -> None:
    graphs = stages[1].graphs
    inputs = random_inputs(graphs.capture)
    expected, _ = run_joint(graphs.capture, inputs)
    for split_backward in (False, True):
        found, _ = run_recomposed(graphs, inputs, split_backward=split_backward)
        assert same_bits(found, expected)


@pytest.fixture(scope="module")
def trained_eagerly(cpu_trains: None, parts: list[Attention]) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients of batch 1."""
    return torch.stack(train_eagerly(parts, 1)), taken_gradients(parts)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_a_mask_is_split_with_its_samples(
    stages: list[GraphPipelineStage],
    parts: list[Attention],
    trained_eagerly: tuple[Tensor, list[Tensor]],
    name: str,
) -> None:
    schedule = schedule_of(name, num_ranks=1, num_stages=2, num_microbatches=NUM_MICROBATCHES)
    assert (
        operators(stages[1]._executables.computing["FORWARD"].action) == []
    )  # they are in regions
    evaluated, trained = step(stages, schedule, 1)
    losses, gradients = trained_eagerly
    assert torch.equal(torch.stack(evaluated.losses), losses)
    assert torch.equal(torch.stack(trained.losses), losses)
    assert same_bits(taken_gradients(parts), gradients)


def _refusal(stage: GraphPipelineStage, inputs: MicrobatchInputs) -> str:
    with pytest.raises(StageInputError) as caught:
        stage.forward(0, (), inputs)
    (problem,) = caught.value.problems
    return problem


def test_refuses_a_mask_of_another_function(stages: list[GraphPipelineStage]) -> None:
    given = first_microbatch()
    mask = create_block_mask(
        causal, MICROBATCH_SIZE, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32
    )
    assert _refusal(stages[0], MicrobatchInputs(args=given.args, kwargs={"mask": mask})) == (
        "kwargs['mask']: BlockMask with mask_mod causal, captured with _of_samples_from.<locals>."
        "mask_mod(and_masks.<locals>.and_mask(causal, mask_of.<locals>.same))"
    )
    assert _refusal(stages[0], MicrobatchInputs(args=given.args, kwargs={"mask": None})) == (
        "kwargs['mask']: None, captured as BlockMask"
    )


def test_refuses_masks_that_were_split_by_numbers_in_python() -> None:
    x, _, documents = batch(0)
    args, kwargs = split_args_kwargs_into_chunks(
        (x,), {"mask": mask_of(documents)}, NUM_MICROBATCHES
    )
    first, second = (
        MicrobatchInputs(args=args[i], kwargs=kwargs[i]) for i in range(MICROBATCH_SIZE)
    )
    stage = GraphPipelineStage(Attention(), stage_index=0, num_stages=2, inputs=first)
    (output,) = stage.forward(0, (), first)
    assert output.shape == (MICROBATCH_SIZE, LENGTH, WIDTH)
    stage.discard()
    # Versions of torch differ in how many parts of a mask come before it.
    assert re.fullmatch(
        r"kwargs\['mask'\]\._closure_\d+: 2, captured with the constant 0; give a tensor if "
        "microbatches differ in it",
        _refusal(stage, second),
    )


@pytest.mark.slow  # workers import FlexAttention and capture, each of them
@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_two_ranks_compute_what_one_eager_process_does(two: GlooWorkers, name: str) -> None:
    found = two.run(train_pipeline, name)
    assert [differing for differing, _ in found] == [[], []]
    assert sum(num_losses for _, num_losses in found) == NUM_MICROBATCHES


@pytest.mark.slow  # likewise
def test_sharded_stages_compute_what_eager_sharded_data_parallelism_does(two: GlooWorkers) -> None:
    assert two.run(train_sharded) == [[], []]
