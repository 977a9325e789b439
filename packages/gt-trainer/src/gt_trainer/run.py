"""One training run, from a finished configuration to the last checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import filesystem
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from gt_passes.simulation import Hardware
from gt_trainer.launcher import (
    ChildFailedError,
    ChildTimedOutError,
    RunStoppedError,
    run_in_child,
)
from gt_trainer.parallelism_options import balance_of
from gt_trainer.placement.kept_plan import (
    JUDGEMENT_FILE,
    PLAN_FILE,
    by_hand_file_of,
    is_judged,
    may_take_by_hand,
    plan_file_of,
    with_plan_file,
)
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
from gt_trainer.preflight.checkpoint_folder import can_be_resumed
from gt_trainer.preflight.plan_file_violations import plan_problem
from gt_trainer.preflight.preflight import topology_of
from gt_trainer.preflight.settled_defaults import describe_run
from gt_trainer.run_lock import locked
from gt_trainer.step_folders import is_complete, newest_checkpoint, step_folders
from gt_trainer.trainer import GraphTrainer

if TYPE_CHECKING:
    from gt_trainer.placement.pipeline_judgement import PipelineJudgement

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEXT_TO_NOTHING_BYTES = 16 * 2**20


class CheckpointFailedError(RuntimeError):
    """A checkpoint could not be saved or loaded; the text has each rank's traceback."""


class DiskFullError(RunStoppedError):
    """There was no room for what the run had to write."""


def train(
    config: GraphTrainer.Config,
    *,
    by_hand: GraphTrainer.Config | None = None,
    hardware: Hardware | None = None,
) -> None:
    """Build the trainer, train, and close it also when training fails.

    Every rank of a run calls this, with the rendezvous in the environment (RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    Args:
        config: A finished configuration that ``preflight`` accepts.
        by_hand: The same run without a solver, as ``settled_by_hand`` gives it, which a pipeline
            takes where it is faster in simulation; None leaves it the plan.
        hardware: The machine by which stages are balanced, and which plans are priced for, where
            that is asked for; H100 SXM by default.

    Raises:
        FolderInUseError: Another run writes to the same folder.
        DiskFullError: A file or a checkpoint had no room.
        CheckpointFailedError: A checkpoint could not be saved or loaded for another reason.
        Exception: Whatever building or training raises.
    """
    try:
        is_first = os.environ.get("RANK", "0") == "0"
        is_local = not filesystem.is_remote(config.dump_folder)
        folder = Path(config.dump_folder)
        lock = locked(folder) if is_first and is_local else contextlib.nullcontext()
        with lock, planned_for(PlannedMachine(hardware=hardware)):
            if by_hand is not None and may_take_by_hand(config):
                _train_judged(config, by_hand, hardware)
            else:
                if is_first and (kept := by_hand_file_of(config)) is not None:
                    logger.warning(
                        f"{kept} says that these checkpoints were made by hand, which the options "
                        "of this run do not allow: it goes on with a plan, kept in its place"
                    )
                _train(_with_plan(_balanced(config, hardware), hardware))
    except CheckpointException as error:
        raise _what_ended(error, config) from None
    except OSError as error:
        if not _says_full(error):
            raise
        raise _disk_full(config) from None


def _train_judged(
    config: GraphTrainer.Config, by_hand: GraphTrainer.Config, hardware: Hardware | None
) -> None:
    """Train a pipeline with its plan or by hand, as rank 0 says."""
    judgement = None
    started = time.monotonic()
    if os.environ.get("RANK", "0") == "0":
        if is_judged(config):
            judgement = _judgement(config, by_hand, hardware)
            path = Path(config.dump_folder) / PLAN_FILE
            if judgement is None and path.is_file():
                config = replace(config, compile=with_plan_file(config.compile, path))
        if judgement is None:
            config = _balanced(config, hardware, spent_seconds=time.monotonic() - started)
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            logger.info(f"By hand, unlike what was said above: {describe_run(by_hand, world_size)}")
    if _first_rank_says(judgement is not None, config):
        config = by_hand
    _train(config, judgement)


def _judgement(
    config: GraphTrainer.Config, by_hand: GraphTrainer.Config, hardware: Hardware | None
) -> PipelineJudgement | None:
    """Why the step by hand is taken; None if the plan is, which then is in the dump folder.

    As for ``_with_plan``, in a child and for half of the time that other ranks wait. A plan that
    was found in that time is taken, if nobody could say what it is worth.
    """
    # Imported here: no other run pays for the solver and the simulation.
    from gt_trainer.dry_run.dry_run import judge_before_training
    from gt_trainer.placement.judged_run import judgement_for

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    kept = by_hand_file_of(config)
    if kept is not None:
        judgement = judgement_for(kept, config, world_size)
        logger.info(f"{judgement}, kept in {kept}")
        return judgement
    if (left := _left_by_a_dry_run(config, world_size)) is not None:
        return left if left.takes_by_hand else None
    plan_path = Path(config.dump_folder) / PLAN_FILE
    plan_path.unlink(missing_ok=True)  # that of another run
    try:
        judgement = run_in_child(
            partial(judge_before_training, config, by_hand, world_size, hardware=hardware),
            timeout_seconds=config.comm.init_timeout_seconds / 2,
        )
    except ChildTimedOutError:
        logger.warning(
            "pipeline: the plan is taken; half of --comm.init_timeout_seconds is not enough to "
            "simulate it beside the step by hand. A dry run with this --dump_folder does, and "
            "leaves there what a start then goes by"
        )
        return None
    except ChildFailedError as error:
        if plan_path.is_file():
            logger.warning(
                "pipeline: the plan is taken; the step by hand could not be simulated beside it: "
                f"{error}"
            )
            return None
        raise RunStoppedError(
            "the pipeline could not be simulated before training (to train with its plan without: "
            f"--compile.autoparallel_solver.no_simulate_rivals): {error}"
        ) from None
    logger.info(str(judgement))
    return judgement if judgement.takes_by_hand else None


def _left_by_a_dry_run(config: GraphTrainer.Config, world_size: int) -> PipelineJudgement | None:
    """How a dry run of this run judged; None if there was none, or what it left is of no use."""
    from gt_trainer.placement.judged_run import judgement_left
    from gt_trainer.placement.pipeline_judgement import NoJudgementError

    plan_path = Path(config.dump_folder) / PLAN_FILE
    path = plan_path.with_name(JUDGEMENT_FILE)
    if not path.is_file():
        return None
    try:
        judgement = judgement_left(path, plan_path, config, world_size)
    except (NoJudgementError, OSError) as error:
        logger.warning(f"{error}: plan and step by hand are compared again")
        return None
    if not judgement.takes_by_hand:
        problem = plan_problem(plan_path, config, topology_of(config, world_size))
        if problem is not None:
            logger.warning(
                f"{plan_path} is not for this run: plan and step by hand are compared again. "
                f"{problem}"
            )
            return None
    logger.info(f"{judgement}, found by the dry run that wrote {path}")
    return judgement


def _first_rank_says(yes: bool, config: GraphTrainer.Config) -> bool:
    """What rank 0 says, on every rank; they have a process group from then on."""
    device = titan_utils.get_local_device()
    titan_utils.device_module.set_device(device)
    dist_utils.init_distributed(
        config.comm,
        enable_cpu_backend=config.training.enable_cpu_offload,
        base_folder=config.dump_folder,
    )
    said = torch.tensor([int(yes)], device=device)
    torch.distributed.broadcast(said, src=0)
    return bool(said.item())


def _balanced(
    config: GraphTrainer.Config, hardware: Hardware | None, *, spent_seconds: float = 0.0
) -> GraphTrainer.Config:
    """The configuration with its stages by name if they are to be balanced, on rank 0.

    A child does it: ranks that do not exist have meshes, and DTensor keeps what it found on these
    for those of the same ranks that do exist. It comes before CUDA and the process group, which no
    child could use. Rank 0 hands the stages over once there is one; the others wait for it to join,
    and have done so for ``spent_seconds``.
    """
    balance = balance_of(config.parallelism)
    if balance == "layers" or os.environ.get("RANK", "0") != "0":
        return config
    # Imported here, and below: no other run pays for the solver and the simulation.
    from gt_trainer.dry_run.simulated_balance import balance_before_training, with_stages

    if (path := plan_file_of(config)) is not None:
        from gt_trainer.pipelines.planned_stages import stages_of_plan

        return with_stages(config, stages_of_plan(path))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    seconds = config.comm.init_timeout_seconds
    try:
        found = run_in_child(
            partial(balance_before_training, config, world_size, hardware=hardware),
            timeout_seconds=seconds - spent_seconds,
        )
    except ChildFailedError as error:
        raise RunStoppedError(
            f"--parallelism.pipeline_parallel_balance {balance}: no stages were found, and other "
            f"ranks wait for no more than --comm.init_timeout_seconds {seconds}: {error}"
        ) from None
    for line in str(found).splitlines():
        logger.info(line)
    return with_stages(config, found.names_per_stage)


def _with_plan(config: GraphTrainer.Config, hardware: Hardware | None) -> GraphTrainer.Config:
    """The configuration with the file of its plan, if rivals are simulated for it, on rank 0.

    In a child and before CUDA and the process group, for the reasons of ``_balanced``. Rank 0 hands
    the plan over once there is a group. The others wait so long: after half of the time that they
    do, the run goes on with the best plan yet, and says so.
    """
    options = config.compile
    has_rivals = options.autoparallel and options.autoparallel_solver.simulate_rivals
    is_pipelined = config.parallelism.pipeline_parallel_degree > 1
    if not has_rivals or is_pipelined or os.environ.get("RANK", "0") != "0":
        return config
    if plan_file_of(config) is not None:
        return config
    from gt_trainer.dry_run.dry_run import plan_before_training

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    path = Path(config.dump_folder) / PLAN_FILE
    best_path = path.with_name(f".{PLAN_FILE}.best")
    best_path.unlink(missing_ok=True)
    try:
        found = run_in_child(
            partial(
                plan_before_training, config, world_size, best_path=best_path, hardware=hardware
            ),
            timeout_seconds=config.comm.init_timeout_seconds / 2,
        )
        logger.info(f"Plans by their simulated steps:\n{found}")
    except ChildTimedOutError:
        has_plan = best_path.is_file()
        logger.warning(_out_of_time(has_plan=has_plan))
        if not has_plan:
            return config
        best_path.replace(path)
    except ChildFailedError as error:
        raise RunStoppedError(
            "plans could not be simulated before training (to train without: "
            f"--compile.autoparallel_solver.no_simulate_rivals): {error}"
        ) from None
    finally:
        best_path.unlink(missing_ok=True)
    return replace(config, compile=with_plan_file(options, path))


def _out_of_time(*, has_plan: bool) -> str:
    what = (
        "The plan is the best that was found"
        if has_plan
        else "The plan is the cheapest by its prices, and has no rivals: none was found"
    )
    return (
        f"{what} in half of --comm.init_timeout_seconds, which is not enough to find and simulate "
        "all rivals. A dry run does, and writes a plan for --compile.autoparallel_solver.plan"
    )


def _train(config: GraphTrainer.Config, judgement: PipelineJudgement | None = None) -> None:
    trainer: GraphTrainer | None = None
    try:
        trainer = config.build()  # type: ignore[no-untyped-call]  # torchtitan leaves it unannotated
        if judgement is not None:
            from gt_trainer.placement.pipeline_judgement import written_judgement

            trainer.keep_judgement(written_judgement(judgement))
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _what_ended(error: CheckpointException, config: GraphTrainer.Config) -> BaseException:
    """What to raise instead: PyTorch's exception is no ``Exception``, and hides signals in it."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if not isinstance(cause, Exception):  # Ctrl-C or SIGTERM
            return cause
    was_writing = error.args[0] == "write"
    # torch.save hides what the system said: all that it reports is a file that is too short.
    if any(_says_full(cause) for cause in causes) or (was_writing and _is_full(_folder(config))):
        return _disk_full(config)
    return CheckpointFailedError(str(error))


def _says_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_full(folder: Path) -> bool:
    return folder.exists() and shutil.disk_usage(folder).free < _NEXT_TO_NOTHING_BYTES


def _disk_full(config: GraphTrainer.Config) -> DiskFullError:
    folder = _folder(config)
    lines = [
        f"the disk is full: nothing more can be written to {Path(config.dump_folder).absolute()}",
        "  Free some space, or choose a --dump_folder on another disk.",
    ]
    cut_off = [path for path in step_folders(folder) if not is_complete(path)]
    if cut_off:
        lines.append(f"  Cut off while being saved, delete: {', '.join(map(str, cut_off))}")
    newest = newest_checkpoint(folder)
    resumes = config.checkpoint.enable and config.checkpoint.load_step == -1
    if resumes and newest is not None and can_be_resumed(newest, config.checkpoint):
        lines.append(f"  The same command then goes on from {newest}")
    return DiskFullError("\n".join(lines))


def _folder(config: GraphTrainer.Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder
