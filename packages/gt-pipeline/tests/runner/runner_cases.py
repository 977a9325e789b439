"""What each rank does in the tests of the runner; workers import it by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_pipeline import (
    HIDDEN,
    MICROBATCH_SIZE,
    NUM_MICROBATCHES,
    VOCABULARY,
    batch,
    eager_stages,
    gradients_of,
    loss_fn,
    toy,
)

from gt_pipeline.graph import STAGE_FORM, GraphPipelineStage
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs, StepRecord
from gt_pipeline.schedules import Schedule, schedule_of
from gt_pipeline.split import SharedGroup
from gt_trace.artifacts.mesh_axes import MeshAxes


def schedule(name: str, num_ranks: int = 4, num_microbatches: int = NUM_MICROBATCHES) -> Schedule:
    """With two stages a rank where the schedule can have more than one."""
    per_rank = 1 if name in ("GPipe", "1F1B") else 2
    return schedule_of(
        name,
        num_ranks=num_ranks,
        num_stages=per_rank * num_ranks,
        num_microbatches=num_microbatches,
    )


def graph_stages(
    planned: Schedule,
    rank: int,
    *,
    place: Callable[[nn.Module], object] = lambda module: None,
    documents: Mapping[int, str] | None = None,
) -> list[GraphPipelineStage]:
    """As `eager_stages`, but captured, of modules that ``place`` has edited.

    Where there are documents, by stage index, they are loaded instead.
    """
    stages: list[GraphPipelineStage] = []
    for stage in eager_stages(planned, rank):
        place(stage.module)
        tokens, target = (each[:MICROBATCH_SIZE] for each in batch())
        is_first, is_last = stage.stage_index == 0, stage.stage_index == planned.num_stages - 1
        inputs = MicrobatchInputs(
            args=(tokens,) if is_first else (), target=target if is_last else None
        )
        fake_mode = stages[0].fake_mode if stages else None  # stages of one rank may overlap
        rewritten = None
        if documents is not None:
            document = json.loads(documents[stage.stage_index])
            rewritten = STAGE_FORM.decode(
                document, MeshAxes.of(), blob=_NO_BLOBS, fake_mode=fake_mode
            )
        stages.append(
            GraphPipelineStage(
                stage.module,
                stage_index=stage.stage_index,
                num_stages=planned.num_stages,
                activations=stage.input_signature,
                inputs=inputs,
                loss_fn=loss_fn if is_last else None,
                prepare_capture=None if documents is None else _refuse_to_capture,
                rewritten=rewritten,
                fake_mode=fake_mode,
            )
        )
    return stages


_NO_BLOBS: Callable[[str], bytes] = {}.__getitem__


def _refuse_to_capture(capture: object) -> None:
    raise AssertionError("a stage was captured")


def stage_documents(planned: Schedule) -> dict[int, str]:
    """All stages of a pipeline as JSON, by stage index, captured rank by rank in this process."""
    return {
        stage.stage_index: json.dumps(STAGE_FORM.encode(stage.rewritten, MeshAxes.of()).document)
        for rank in range(planned.num_ranks)
        for stage in graph_stages(planned, rank)
    }


def train_graphs(
    name: str, documents: Mapping[int, str] | None = None
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], int]:
    """As `train_and_evaluate` of graph stages, evaluated first; and the peak of live chunks."""
    planned = schedule(name, dist.get_world_size())
    stages = graph_stages(planned, dist.get_rank(), documents=documents)
    with GraphPPRunner(stages, planned) as runner:
        tokens, target = batch(0)
        evaluated = list(runner.eval(tokens, target=target).losses)
        runner.step(tokens, target=target)
        runner.record_steps = True
        tokens, target = batch(1)
        result = runner.step(tokens, target=target)
    assert result.record is not None
    gradients = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.parameters().items()
        if parameter.grad is not None
    }
    return evaluated, list(result.losses), gradients, result.record.peak_live


def train_and_evaluate(
    name: str, num_steps: int, evaluate_first: bool
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Losses of the first evaluation, of the last step, and this rank's gradients."""
    planned = schedule(name, dist.get_world_size())
    stages = eager_stages(planned, dist.get_rank())
    evaluated: list[Tensor] = []
    trained: list[Tensor] = []
    with GraphPPRunner(stages, planned) as runner:
        if evaluate_first:
            tokens, target = batch(0)
            evaluated = list(runner.eval(tokens, target=target).losses)
        for step in range(num_steps):
            tokens, target = batch(step)
            trained = list(runner.step(tokens, target=target).losses)
    return evaluated, trained, gradients_of([stage.module for stage in stages])


def train_tied(name: str, one_parameter: bool) -> dict[str, Tensor]:
    """Gradients of this rank after one step of a model whose head is its embedding.

    Args:
        name: of the schedule.
        one_parameter: whether a rank with both stages holds one parameter, not two alike.
    """
    planned = schedule(name)
    whole = toy(planned.num_stages, tied=True)
    if not one_parameter:
        assert whole.head is not None
        # Other values than the embedding's, until they are synchronized.
        whole.head.weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN))
    stages = eager_stages(planned, dist.get_rank(), whole=whole)
    tokens, target = batch()
    with GraphPPRunner(stages, planned, shared_groups=[TIED]) as runner:
        runner.synchronize_shared_parameters()
        runner.step(tokens, target=target)
    return gradients_of([stage.module for stage in stages])


def record(name: str) -> StepRecord:
    """What this rank recorded of its second step."""
    planned = schedule(name)
    tokens, target = batch()
    with GraphPPRunner(eager_stages(planned, dist.get_rank()), planned) as runner:
        runner.step(tokens, target=target)
        runner.record_steps = True
        recorded = runner.step(tokens, target=target).record
    assert recorded is not None
    return recorded


TIED = SharedGroup(("embedding.weight", "head.weight"))
