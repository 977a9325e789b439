"""Do all ranks mean the same pipeline? Asked once, when a runner is made, so that no step has to.

What every rank finds wrong, and what only shows when ranks are compared, is raised on all of them:
a rank that went on alone would wait for the others until a timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from gt_pipeline.errors import RunnerSetupError
from gt_pipeline.runner.object_exchange import gather_objects
from gt_pipeline.runner.stage_collectives import digests_of, explain_differences
from gt_pipeline.runner.stage_protocol import ActivationSignature, NamesKwargs, PipelineStageGraphs
from gt_pipeline.runner.transfers import MAX_TENSORS
from gt_pipeline.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What other ranks must know of a stage."""

    inputs: tuple[ActivationSignature, ...]
    outputs: tuple[ActivationSignature, ...]
    parameters: tuple[str, ...]
    known_kwargs: frozenset[str] | None
    """Names of keyword arguments that the stage may take; None: it may take any."""

    collectives: Mapping[str, str]
    """A digest of the collectives of each action or pair of actions, in order; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank tells the others about its runner."""

    rank: int
    pipeline: tuple[int, ...]
    """Global ranks of the pipeline that the rank is in, in order."""

    stages: Mapping[int, StageFacts]
    same_everywhere: Mapping[str, str]
    """What must be alike on all ranks of the pipeline, with what it is called."""

    problems: tuple[str, ...] = field(default=())
    """What the rank found wrong without the others."""


def facts_of_rank(
    stages: Sequence[PipelineStageGraphs],
    schedule: Schedule,
    *,
    rank: int,
    pipeline: Sequence[int],
    options: Mapping[str, Any],
    problems: Sequence[str] = (),
) -> RankFacts:
    """What this rank tells, with what it finds wrong beside the ``problems`` found before.

    ``rank`` and those of ``pipeline`` are global; ``options`` must be alike on all of them.
    """
    problems = list(problems)
    if len(pipeline) != schedule.num_ranks:
        problems.append(
            f"the schedule is for {schedule.num_ranks} ranks, the pipeline's group has "
            f"{len(pipeline)}"
        )
    elif rank not in pipeline:
        problems.append(f"the rank is not among those of the pipeline, {list(pipeline)}")
    else:
        expected = schedule.stages_of_rank(list(pipeline).index(rank))
        given = sorted(stage.stage_index for stage in stages)
        if given != list(expected):
            problems.append(f"stages {given} were given, the schedule has {list(expected)} here")
    if len({stage.device for stage in stages}) > 1:
        problems.append(f"its stages are on devices {sorted({str(s.device) for s in stages})}")
    for stage in stages:
        problems += [f"stage {stage.stage_index}: {text}" for text in _of_stage(stage, schedule)]
    lists = "\n".join(" ".join(map(str, actions)) for actions in schedule.compute)
    digest = hashlib.sha256(lists.encode()).hexdigest()[:12]
    same = {"schedule": f"{schedule.name} with {schedule.num_microbatches} microbatches ({digest})"}
    return RankFacts(
        rank=rank,
        pipeline=tuple(pipeline),
        stages={
            stage.stage_index: StageFacts(
                inputs=stage.input_signature,
                outputs=stage.output_signature,
                parameters=tuple(stage.parameters()),
                known_kwargs=stage.known_kwargs if isinstance(stage, NamesKwargs) else None,
                collectives=digests_of(stage),
            )
            for stage in stages
        },
        same_everywhere=same | {name: str(value) for name, value in options.items()},
        problems=tuple(problems),
    )


def _of_stage(stage: PipelineStageGraphs, schedule: Schedule) -> list[str]:
    problems = []
    if stage.num_stages != schedule.num_stages:
        problems.append(
            f"it is one of {stage.num_stages} stages, the schedule has {schedule.num_stages}"
        )
    if stage.stage_index == 0 and stage.input_signature:
        problems.append("the first stage takes arguments, no activations, but has a signature")
    if stage.stage_index == schedule.num_stages - 1:
        outputs = stage.output_signature
        if not outputs or outputs[0].shape != () or not outputs[0].requires_grad:
            problems.append(
                "the last stage must return the loss first, of shape () and with a gradient; "
                f"its signature is {_shown(outputs)}"
            )
        if any(each.requires_grad for each in outputs[1:]):
            problems.append(f"only the loss can have a gradient: {_shown(outputs)}")
    for name, signature in (("takes", stage.input_signature), ("returns", stage.output_signature)):
        if len(signature) > MAX_TENSORS:
            problems.append(f"it {name} {len(signature)} tensors; at most {MAX_TENSORS} can travel")
    return problems


def agree_on_setup(
    mine: RankFacts,
    group: dist.ProcessGroup | None,
    stages: Sequence[PipelineStageGraphs] = (),
) -> dict[tuple[int, ...], tuple[RankFacts, ...]]:
    """Tell all ranks, and hear from them by a gloo group; None if there are no others.

    Returns:
        Facts of the ranks of every pipeline, in its order, by its ranks; alike on all ranks.

    Raises:
        RunnerSetupError: on every rank alike, if any rank or pair of ranks is wrong.
    """
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = gather_objects(mine, group)
    problems = [f"rank {facts.rank}: {text}" for facts in everyone for text in facts.problems]
    pipelines = {}
    for ranks in sorted({facts.pipeline for facts in everyone}):
        members = {facts.rank: facts for facts in everyone if facts.pipeline == ranks}
        if strangers := sorted(set(ranks) - set(members)):
            problems.append(f"ranks {strangers} are of the pipeline {ranks}, and say otherwise")
            continue
        pipelines[ranks] = tuple(members[rank] for rank in ranks if rank in members)
        problems += _differences(list(members.values()))
        if not problems:
            problems += _misfits(list(members.values()))
    if group is not None and not problems:
        digests = {
            facts.rank: {index: each.collectives for index, each in facts.stages.items()}
            for facts in everyone
        }
        problems += explain_differences(digests, stages, group)
    if problems:
        raise RunnerSetupError(what="this pipeline cannot run", problems=problems)
    return pipelines


def names_of_stages(pipeline: Sequence[RankFacts]) -> dict[int, tuple[str, ...]]:
    """Names of parameters, of every stage of a pipeline."""
    return {index: each.parameters for rank in pipeline for index, each in rank.stages.items()}


def kwargs_of_stages(pipeline: Sequence[RankFacts]) -> frozenset[str] | None:
    """Keyword arguments that some stage of a pipeline may take; None: any."""
    known = [facts.known_kwargs for rank in pipeline for facts in rank.stages.values()]
    names = [each for each in known if each is not None]
    return frozenset().union(*names) if len(names) == len(known) else None


def ranks_of_stages(pipeline: Sequence[RankFacts]) -> dict[int, int]:
    """The global rank of every stage of a pipeline."""
    return {index: rank.rank for rank in pipeline for index in rank.stages}


def _differences(members: Sequence[RankFacts]) -> list[str]:
    problems = []
    for name in members[0].same_everywhere:
        by_value: dict[str, list[int]] = {}
        for facts in members:
            by_value.setdefault(facts.same_everywhere[name], []).append(facts.rank)
        if len(by_value) > 1:
            shown = "; ".join(f"ranks {ranks} have {value}" for value, ranks in by_value.items())
            problems.append(f"{name} must be the same on all ranks of a pipeline: {shown}")
    return problems


def _misfits(members: Sequence[RankFacts]) -> list[str]:
    stages = {index: facts for each in members for index, facts in each.stages.items()}
    return [
        f"stage {index} returns {_shown(stages[index].outputs)}, "
        f"stage {index + 1} takes {_shown(stages[index + 1].inputs)}"
        for index in sorted(stages)
        if index + 1 in stages and stages[index].outputs != stages[index + 1].inputs
    ]


def _shown(signatures: Sequence[ActivationSignature]) -> str:
    return f"({', '.join(map(str, signatures))})"
