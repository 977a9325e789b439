"""What workers run to save a placed run and go on from it under another placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from placement.cases import full, placed_pass, worst_error
from torch.distributed.tensor import DTensor
from training_cases import Case, RecordingTrainer, close, same, trainer_of

from gt_autoparallel import PlanMismatchError
from gt_config import AutoParallelConfig

SAVED_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedCase:
    """A run that saves, or goes on from what another one saved."""

    model: Case
    memory_budget_gib: float | None = None
    is_placed: bool = True
    """By a solver; else by its parallelism."""

    plan: str | None = None
    """File of the plan to place it by."""

    def trainer(self, folder: str, **checkpoint: Any) -> RecordingTrainer:
        """In this worker's process group, with these options of ``--checkpoint``."""
        solver = AutoParallelConfig(memory_budget_gib=self.memory_budget_gib, plan=self.plan)
        return trainer_of(
            self.model,
            "aot_fx_trace",
            folder,
            stop_after=SAVED_STEP,
            options={"autoparallel": True, "autoparallel_solver": solver} if self.is_placed else {},
            enable=True,
            interval=SAVED_STEP,
            **checkpoint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A checkpoint of a placed run, loaded by another run, on this rank."""

    differing: tuple[str, ...]
    """Parameters and states of the optimizer that are not, bit for bit, those that were saved."""

    num_compared: int
    losses: tuple[float, float]
    """Of the next step, over all ranks: of the run that goes on, and of the one that loaded."""

    worst_parameter: tuple[float, str]
    """After that step: the largest relative error in norm, and the parameter that has it."""

    layouts_differ: bool
    """Whether the two runs hold some parameter in another way."""


def resume_elsewhere(
    case: ResumedCase, others: Mapping[str, ResumedCase], folder: str
) -> dict[str, Resumption]:
    """Some steps of ``case``, saved; then each of ``others`` goes on from there by one step."""
    saved = case.trainer(f"{folder}/saved")
    saved.train()
    state, held = whole_state(saved), layouts(saved)
    loss = one_step(saved)
    parameters = {n: full(p).clone() for n, p in saved.model_parts[0].named_parameters()}
    close(saved)
    found = {}
    for name, other in others.items():
        trainer = other.trainer(
            f"{folder}/{name}",
            initial_load_path=f"{folder}/saved/checkpoint/step-{SAVED_STEP}",
            initial_load_model_only=False,
            # How batches lie on ranks is no part of a placement.
            exclude_from_loading=["dataloader"],
        )
        trainer.checkpointer.load()
        loaded = whole_state(trainer)
        found[name] = Resumption(
            differing=tuple(
                key
                for key in sorted(state.keys() | loaded.keys())
                if key not in state or key not in loaded or not same(state[key], loaded[key])
            ),
            num_compared=len(loaded),
            losses=(loss, one_step(trainer)),
            worst_parameter=worst_error(
                dict(trainer.model_parts[0].named_parameters()), parameters
            ),
            layouts_differ=layouts(trainer) != held,
        )
        close(trainer)
    return found


def one_step(trainer: RecordingTrainer) -> float:
    """Forward, backward and update on a batch that no data loader has a part in."""
    trainer.optimizers.zero_grad()
    loss = placed_pass(trainer, 0)
    trainer.optimizers.step()
    return loss


def whole_state(trainer: RecordingTrainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and of the optimizer's states, each whole."""
    states = {
        **dict(trainer.model_parts[0].named_parameters()),
        **{k: v for k, v in trainer.optimizers.state_dict().items() if isinstance(v, torch.Tensor)},
    }
    return {name: full(value).clone() for name, value in states.items()}


def layouts(trainer: RecordingTrainer) -> dict[str, str]:
    """How each parameter is held, in words."""
    return {
        name: f"{parameter.placements} on {parameter.device_mesh}"
        for name, parameter in trainer.model_parts[0].named_parameters()
        if isinstance(parameter, DTensor)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SamePlan:
    """Runs that were given, or have kept, the plan of another one, on this rank."""

    layouts_differ: dict[str, bool]
    """Of each run: whether it holds some parameter otherwise than the first one did."""

    losses: dict[str, float]
    """Of the next step after the checkpoint, over all ranks."""

    refusals: dict[str, str]
    """What is said where the plan is not for the run."""


def with_the_plan_of_another(
    case: ResumedCase, others: Mapping[str, Case], folder: str
) -> SamePlan:
    """Some steps of ``case``, saved; then runs with its plan, and ``others`` that it is not for.

    The ones that go on ask for no budget.
    """
    saved = case.trainer(f"{folder}/saved")
    saved.train()
    held, losses = layouts(saved), {"saved": one_step(saved)}
    close(saved)
    plan = f"{folder}/saved/placement.json"
    differ = {}
    runs = {
        "resumed": (ResumedCase(model=case.model), f"{folder}/saved", {}),
        "given": (
            ResumedCase(model=case.model, plan=plan),
            f"{folder}/given",
            {
                "initial_load_path": f"{folder}/saved/checkpoint/step-{SAVED_STEP}",
                "initial_load_model_only": False,
            },
        ),
    }
    for name, (run, own_folder, checkpoint) in runs.items():
        trainer = run.trainer(own_folder, **checkpoint)
        trainer.checkpointer.load()
        differ[name] = layouts(trainer) != held
        losses[name] = one_step(trainer)
        close(trainer)
    refusals = {}
    for name, model in others.items():
        try:
            ResumedCase(model=model, plan=plan).trainer(f"{folder}/{name}")
        except PlanMismatchError as error:
            refusals[name] = str(error)
    return SamePlan(layouts_differ=differ, losses=losses, refusals=refusals)
