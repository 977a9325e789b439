"""Do ranks that hold the same stage run the same collectives? Asked before the first step.

Such ranks gather parameters, reduce gradients and exchange tokens with each other. If two of them
ran other sequences, all would hang until a timeout that names nothing. A stage that was captured
knows its sequences; what a schedule pairs is made ready first, so that it counts as well, and what
evaluation runs before the first one. Digests are compared by all ranks of the world, and the
sequences sent only if they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch.distributed as dist

from gt_pipeline.errors import RunnerSetupError
from gt_pipeline.runner.object_exchange import gather_objects
from gt_pipeline.runner.stage_protocol import CapturedStageGraphs, PipelineStageGraphs
from gt_pipeline.schedules.schedule import LoweredSchedule


def prepare_pairs(lowered: LoweredSchedule, stages: Mapping[int, PipelineStageGraphs]) -> list[str]:
    """Make ready what pairs of actions of this rank's stages will run.

    Returns:
        A sentence for each pair that cannot be; raised on all ranks, it is no error here.
    """
    problems = []
    pairs = {
        (forward.stage, backward.stage, backward.kind)
        for actions in lowered.actions
        for action in actions
        if action.parts is not None
        for forward, backward in [action.parts]
    }
    for forward, backward, kind in sorted(pairs):
        assert kind in ("FULL_BACKWARD", "BACKWARD_INPUT")
        if forward not in stages or backward not in stages:
            continue
        stage = stages[forward]
        if isinstance(stage, CapturedStageGraphs):
            try:
                stage.prepare_overlap(stages[backward], kind)
            except Exception as error:  # noqa: BLE001  # whatever it is, all ranks raise it
                problems.append(
                    f"forward of stage {forward} and {kind} of stage {backward} cannot overlap: "
                    f"{type(error).__name__}: {error}"
                )
    return problems


def compare_evaluations(
    stages: Sequence[PipelineStageGraphs], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Make ready what evaluation runs, and compare its collectives. Collective over all ranks.

    ``group`` is of all of them, by gloo; None if there are no others.

    Raises:
        RunnerSetupError: on every rank alike, if it cannot be made ready on any, or differs.
    """
    problems = []
    for stage in stages:
        if isinstance(stage, CapturedStageGraphs):
            try:
                stage.prepare_evaluation()
            except Exception as error:  # noqa: BLE001  # whatever it is, all ranks raise it
                problems.append(
                    f"rank {rank}: evaluation of stage {stage.stage_index} cannot be captured: "
                    f"{type(error).__name__}: {error}"
                )
    if group is not None:
        digests = {} if problems else {each.stage_index: digests_of(each) for each in stages}
        everyone = gather_objects((rank, problems, digests), group)
        problems = [text for _, of_rank, _ in everyone for text in of_rank]
        if not problems:
            by_rank = {each: of_rank for each, _, of_rank in everyone}
            problems = explain_differences(by_rank, stages, group)
    if problems:
        raise RunnerSetupError(what="this pipeline cannot evaluate", problems=problems)


def digests_of(stage: PipelineStageGraphs) -> dict[str, str]:
    """SHA-256 of each sequence of collectives of a stage, by what runs it.

    Nothing of a stage that does not know them.
    """
    return {
        name: hashlib.sha256("\n".join(lines).encode()).hexdigest()
        for name, lines in _collectives_of(stage).items()
    }


def explain_differences(
    digests: Mapping[int, Mapping[int, Mapping[str, str]]],
    stages: Sequence[PipelineStageGraphs],
    group: dist.ProcessGroup,
) -> list[str]:
    """A sentence for each stage that ranks hold with different collectives. Collective over them.

    ``digests`` are of every rank, by stage, alike on all ranks; ``stages`` are this rank's.
    """
    first: dict[int, Mapping[str, str]] = {}
    differing = {
        index
        for by_stage in digests.values()
        for index, each in by_stage.items()
        if first.setdefault(index, each) != each
    }
    if not differing:
        return []
    mine = {
        stage.stage_index: dict(_collectives_of(stage))
        for stage in stages
        if stage.stage_index in differing
    }
    by_rank = dict(zip(digests, gather_objects(mine, group), strict=True))
    return [_explain(index, by_rank) for index in sorted(differing)]


def _collectives_of(stage: PipelineStageGraphs) -> Mapping[str, Sequence[str]]:
    return stage.collectives() if isinstance(stage, CapturedStageGraphs) else {}


def _explain(index: int, by_rank: Mapping[int, Mapping[int, Mapping[str, Sequence[str]]]]) -> str:
    """The first collective that differs, between the first two ranks that differ."""
    (one, mine), *others = [(rank, of[index]) for rank, of in by_rank.items() if index in of]
    rank, theirs = next((rank, of) for rank, of in others if of != mine)
    for name in dict.fromkeys((*mine, *theirs)):
        pairs = zip_longest(mine.get(name, ()), theirs.get(name, ()))
        for position, (line, other) in enumerate(pairs):
            if line != other:
                return (
                    f"ranks {one} and {rank} hold stage {index}, and would wait for each other's "
                    f"collectives forever; the first that differs is number {position} of {name}: "
                    f"rank {one} launches {line or 'no more'}; rank {rank} launches "
                    f"{other or 'no more'}"
                )
    raise AssertionError("their digests differ")
