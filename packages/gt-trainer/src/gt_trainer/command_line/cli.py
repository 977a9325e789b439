"""``gt-train``: from the command line to the exit status.

The order is that of cost. What is wrong is found before it is paid for: names, options and numbers
without torch; then, after the one import of torchtitan, the configuration; then the ranks start.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gt_config import ConfigError
from gt_trainer.command_line.command_line import (
    HARDWARE_FOR,
    CommandLine,
    UsageError,
    check_launch,
    flags_given,
    listing,
    parse_command_line,
    usage,
)
from gt_trainer.command_line.early_refusal import refuse_early
from gt_trainer.command_line.load_configuration import load_configuration
from gt_trainer.late_imports import hint_to_compile, left_out
from gt_trainer.launcher import (
    ForkUnsafeError,
    Rendezvous,
    RendezvousError,
    Restarts,
    find_rendezvous,
    launch,
    prepare_environment,
)
from gt_trainer.metrics.metrics_history import (
    METRICS_FILE,
    VALIDATION_FILE,
    MetricsFileError,
    MetricsHistoryError,
    read_metrics,
)
from gt_trainer.models.catalog import INTENDED_WORLD_SIZE
from gt_trainer.report.dump_folder import ReportError, read_run
from gt_trainer.report.page import report_page
from gt_trainer.run_files import REPORT_FILE, STARTS_FILE
from gt_trainer.startup import PROCESS_START_VARIABLE

if TYPE_CHECKING:
    from gt_passes.simulation import Hardware
    from gt_trainer.preflight.plain_settings import TypedFlags
    from gt_trainer.trainer import GraphTrainer

_BAD_INPUT = 2
_SIGNALLED = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``gt-train``.

    Args:
        arguments: The command line without the program's name; None takes ``sys.argv``.

    Returns:
        The exit status: 0 done, 1 the run failed, 2 bad input (nothing was started), 128 + n after
        signal n.
    """
    started = time.time()
    try:
        command = parse_command_line(sys.argv[1:] if arguments is None else arguments)
        if command.action in ("help", "list", "version"):
            return _show(command)
        if command.folder is not None:
            return _report(command.folder)
        rendezvous = find_rendezvous(os.environ)
        check_launch(command, rendezvous)
        return _run(command, rendezvous, started)
    except (UsageError, ConfigError, RendezvousError) as error:
        _tell_once_a_machine(f"gt-train: {error}")
        return _BAD_INPUT
    except ForkUnsafeError as error:
        _tell(f"gt-train: {error}")
        return 1
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _show(command: CommandLine) -> int:
    texts: dict[str, Callable[[], str]] = {
        "help": usage,
        "list": lambda: listing() + "\n",
        "version": _versions,
    }
    return _print(texts[command.action]())


def _report(folder: Path) -> int:
    path = folder / REPORT_FILE
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        page = report_page(read_run(folder))
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except (ReportError, OSError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UsageError(str(error)) from None
    return _print(f"{path}\n")


def _print(text: str) -> int:
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def _versions() -> str:
    ours = ("trainer", "pipeline", "autoparallel", "passes", "trace", "config")
    names = (*(f"gt-{name}" for name in ours), "torch", "torchtitan")
    return "".join(f"{name} {_version(name)}\n" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its sources)"


def _run(command: CommandLine, rendezvous: Rendezvous | None, started: float) -> int:
    num_ranks = command.num_processes or 1
    if command.action in ("dry-run", "precompile"):  # for ranks that do not exist
        world_size = command.world_size or INTENDED_WORLD_SIZE.get(command.config, 1)
    else:
        world_size = num_ranks if rendezvous is None else rendezvous.world_size
    if command.action not in ("help-all", "plan"):
        refuse_early(command, world_size)
    num_threads = None
    if command.action == "plan":
        prepare_environment(os.environ, num_ranks=2)  # its children are forked
    if num_ranks > 1:
        # The ranks' own clocks start at the fork.
        os.environ.setdefault(PROCESS_START_VARIABLE, str(started))
        num_threads = prepare_environment(os.environ, num_ranks=num_ranks)

    # Stages are balanced in a child of rank 0, which can use CUDA if nobody has before the fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    with _without_garbage_collection():
        from gt_trainer import device

        # A dry run is of the GPUs that the job is meant for, on whatever machine.
        dry = command.action in ("dry-run", "plan")
        with device.intended_for("cuda") if dry else contextlib.nullcontext():
            config = load_configuration(command)
        from gt_trainer import run
        from gt_trainer.command_line import overrides
        from gt_trainer.command_line.what_is_left import left_by_ended, results_of
        from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
        from gt_trainer.preflight import plain_settings, preflight, settled_defaults
        from gt_trainer.run_lock import use_of
    if command.action == "help-all":
        return _print(overrides.help_text(config))
    configured = plain_settings.settings_of(config)
    config = overrides.apply_overrides(config, command.overrides)
    asked = flags_given(command.overrides)
    typed = plain_settings.TypedFlags(names=command.typed_flags, configured=configured)
    if command.action == "dry-run":
        return _dry_run(config, world_size, asked=asked, typed=typed, command=command)
    if command.action == "plan":
        return _plan(config, command)
    if command.action == "precompile":
        return _precompile(
            config,
            world_size,
            asked=asked,
            typed=typed,
            hardware=_planning_hardware(command, config),
        )
    hardware = _planning_hardware(command, config)
    by_hand = _pipeline_by_hand(config, world_size, asked=asked)
    config, withdrawn = settled_defaults.settle_defaults(config, world_size, asked=asked)
    with planned_for(PlannedMachine(hardware=hardware)):
        preflight.check_configuration(
            config,
            world_size,
            num_local_ranks=num_ranks if rendezvous is None else rendezvous.local_world_size,
            typed=typed,
        )
    finished = _already_finished(config)
    if finished is not None:
        _tell_once_a_machine(finished)
        return 0
    if rendezvous is None or rendezvous.rank == 0:
        described = settled_defaults.describe_run(config, world_size)
        _print(_lines([*withdrawn, *_hints()], described) + _precisions(config))
    # Ranks of a launched job would find their own; its first takes the lock, or says who has it.
    if rendezvous is None and (use := use_of(Path(config.dump_folder))) is not None:
        raise UsageError(f"{use}; wait for it, or choose another --dump_folder")
    _check_histories(Path(config.dump_folder))
    restarts = _restarts(command.restarts, config) if command.restarts else None
    with _without_garbage_collection():
        for name in left_out(config):
            importlib.import_module(name)
    status = launch(
        partial(run.train, config, by_hand=by_hand, hardware=hardware),
        num_ranks=num_ranks,
        log_folder=_log_folder(config),
        rendezvous=rendezvous,
        shown_ranks=command.shown_ranks | {_rank_with_loss(config, num_ranks)},
        num_threads=num_threads,
        restarts=restarts,
    )
    if rendezvous is None or rendezvous.rank == 0:
        if status == 0:
            _print(f"{results_of(config)}\n")
        elif status > _SIGNALLED:
            _tell(left_by_ended(config))
    return status


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Import without collecting garbage, and exempt what was imported for good.

    Modules are not garbage, but the collector visits them again and again while their number grows:
    that is 2 of torchtitan's 14 CPU seconds, and most of each full collection later.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or native modules report all their objects as leaked
        if was_enabled:
            gc.enable()


def _restarts(at_most: int, config: GraphTrainer.Config) -> Restarts:
    """How the run goes on after a process died: from its newest intact checkpoint, if any is left.

    Raises:
        UsageError: It would not.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        flag = "load_only is True" if checkpoint.enable else "enable is False"
        raise UsageError(f"--restarts goes on from checkpoints, and --checkpoint.{flag}")
    if checkpoint.load_step != -1:
        raise UsageError(
            "--restarts goes on from the newest checkpoint, and --checkpoint.load_step "
            f"{checkpoint.load_step} names one: leave out one of the two"
        )
    folder = Path(config.dump_folder)

    def prepare() -> bool:
        from gt_trainer.checkpoints.damages import set_aside_damaged
        from gt_trainer.run_lock import locked

        if (finished := _already_finished(config)) is not None:
            _tell(finished)
            return False
        with locked(folder):
            for moved in set_aside_damaged(folder / checkpoint.folder):
                _tell(f"gt-train: {moved}")
        os.environ[PROCESS_START_VARIABLE] = str(time.time())
        return True

    return Restarts(at_most=at_most, prepare=prepare)


def _rank_with_loss(config: GraphTrainer.Config, world_size: int) -> int:
    """The rank that reports progress."""
    from gt_trainer.pipelines.pipeline_plan import rank_with_loss

    parallelism = config.parallelism
    return rank_with_loss(
        schedule=parallelism.pipeline_parallel_schedule,
        csv_path=parallelism.pipeline_parallel_schedule_csv,
        pipeline_degree=parallelism.pipeline_parallel_degree,
        world_size=world_size,
    )


def _lines(withdrawn: Sequence[str], description: str) -> str:
    """What a run says of its defaults before it starts."""
    return "".join(f"gt-train: {line}\n" for line in (*withdrawn, description))


def _precisions(config: GraphTrainer.Config) -> str:
    """Of a quantized model, the table of its products."""
    from gt_trainer.quantization.quantized_model import precision_lines, with_quantized_model

    spec = with_quantized_model(config).model_spec
    if spec is None:
        return ""
    lines = precision_lines(
        spec.model,
        config.quantization,
        own_precision=config.training.mixed_precision_param,
    )
    return "".join(f"gt-train: {line}\n" for line in lines)


def _pipeline_by_hand(
    config: GraphTrainer.Config, world_size: int, *, asked: Collection[str]
) -> GraphTrainer.Config | None:
    """The run that a pipeline with a solver is held against; None if there is none."""
    from gt_trainer.placement.kept_plan import may_take_by_hand
    from gt_trainer.preflight.preflight import configuration_violations
    from gt_trainer.preflight.settled_defaults import settled_by_hand

    if not may_take_by_hand(config):
        return None
    by_hand = settled_by_hand(config, world_size, asked=asked)
    assert by_hand is not None
    is_allowed = next(configuration_violations(by_hand, world_size), None) is None
    return by_hand if is_allowed else None


def _hints() -> list[str]:
    import torch

    hint = hint_to_compile(torch)
    return [] if hint is None else [hint]


def _dry_run(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    asked: Collection[str],
    typed: TypedFlags,
    command: CommandLine,
) -> int:
    from gt_trainer.device import intended_for
    from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
    from gt_trainer.preflight.preflight import check_configuration, configuration_violations
    from gt_trainer.preflight.settled_defaults import (
        describe_run,
        settle_defaults,
        settled_by_hand,
    )

    if command.timeline is not None and config.parallelism.pipeline_parallel_degree < 2:
        raise UsageError(
            "--timeline draws the ranks of a pipeline, and --parallelism.pipeline_parallel_degree "
            f"is {config.parallelism.pipeline_parallel_degree}: use --trace"
        )
    hardware = _hardware(command) or _published_hardware(command)
    machine = PlannedMachine(hardware=hardware, is_simulated=True)
    with intended_for("cuda"), planned_for(machine):
        by_hand = settled_by_hand(config, world_size, asked=asked)
        config, withdrawn = settle_defaults(config, world_size, asked=asked)
        check_configuration(config, world_size, will_train=False, typed=typed)
        description = describe_run(config, world_size)
    _print(_lines(withdrawn, description) + _precisions(config))
    from gt_trainer.dry_run.dry_run import dry_run

    def is_allowed(changed: GraphTrainer.Config) -> bool:
        return next(configuration_violations(changed, world_size), None) is None

    def report() -> None:
        with intended_for("cuda"):
            found = dry_run(
                config,
                world_size,
                by_hand=by_hand,
                hardware=hardware,
                is_allowed=is_allowed,
                trace_path=command.trace,
                timeline_path=command.timeline,
            )
            _print(f"{found}\n")

    return launch(report, num_ranks=1, log_folder=_log_folder(config), communicates=False)


def _plan(config: GraphTrainer.Config, command: CommandLine) -> int:
    from gt_trainer.command_line.plan_command import asked_plan

    refusals: list[UsageError] = []

    def report() -> None:
        try:
            asked_plan(config, command, tell=_tell, show=_print)
        except UsageError as error:  # a run that fails is another thing
            refusals.append(error)

    status = launch(report, num_ranks=1, log_folder=_log_folder(config), communicates=False)
    if refusals:
        raise refusals[0]
    return status


def _precompile(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    asked: Collection[str],
    typed: TypedFlags,
    hardware: Hardware | None,
) -> int:
    from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
    from gt_trainer.precompile.precompile import precompile
    from gt_trainer.preflight.preflight import check_configuration
    from gt_trainer.preflight.settled_defaults import describe_run, settle_defaults

    config, withdrawn = settle_defaults(config, world_size, asked=asked)
    with planned_for(PlannedMachine(hardware=hardware)):
        check_configuration(config, world_size, will_train=False, typed=typed)
    _print(_lines(withdrawn, describe_run(config, world_size)) + _precisions(config))

    def report() -> None:
        _print(f"{precompile(config, world_size, hardware=hardware)}\n")

    return launch(report, num_ranks=1, log_folder=_log_folder(config), communicates=False)


def _check_histories(folder: Path) -> None:
    """Refuse files that the run would go on with and cannot read.

    Raises:
        UsageError: a line of one is no record.
    """
    for name in (METRICS_FILE, VALIDATION_FILE, STARTS_FILE):
        try:
            read_metrics(folder / name)
        except (MetricsHistoryError, MetricsFileError) as error:
            raise UsageError(str(error)) from None


def _log_folder(config: GraphTrainer.Config) -> Path:
    return Path(config.dump_folder) / "logs"


def _planning_hardware(command: CommandLine, config: GraphTrainer.Config) -> Hardware | None:
    """As ``_hardware``, of a run that does not simulate: for its planning alone."""
    from gt_trainer.parallelism_options import balance_of

    is_planned = config.compile.autoparallel or balance_of(config.parallelism) != "layers"
    if command.hardware is not None and not is_planned:
        raise UsageError(HARDWARE_FOR)
    return _hardware(command)


def _hardware(command: CommandLine) -> Hardware | None:
    from gt_passes.simulation.hardware import HardwareDataError, load_hardware

    if command.hardware is None:
        return None
    try:
        return load_hardware(command.hardware.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, HardwareDataError) as error:
        raise UsageError(f"--hardware {command.hardware}: {error}") from None


def _published_hardware(command: CommandLine) -> Hardware | None:
    from gt_passes import simulation

    if command.published is None:
        return None
    hardware: Hardware = getattr(simulation, command.published.hardware)()
    return hardware


def _already_finished(config: GraphTrainer.Config) -> str | None:
    """What to say if the newest checkpoint leaves no step to take; None if one is left."""
    from gt_trainer.preflight.checkpoint_folder import can_be_resumed, flags_to_start_from
    from gt_trainer.step_folders import newest_checkpoint, step_of

    if not config.checkpoint.enable or config.checkpoint.load_step != -1:
        return None
    newest = newest_checkpoint(Path(config.dump_folder) / config.checkpoint.folder)
    if newest is None or step_of(newest) < config.training.steps:
        return None
    train_on = f"--training.steps {step_of(newest) + config.training.steps}"
    if not can_be_resumed(newest, config.checkpoint):  # it has weights alone
        train_on = f"{flags_to_start_from(newest)}, and --dump_folder as below"
    return (
        f"gt-train: nothing to do: {newest} is of step {step_of(newest)}, and --training.steps is "
        f"{config.training.steps}.\n"
        f"  To train on:    {train_on}\n"
        "  To start anew:  --dump_folder with a folder that holds no checkpoint"
    )


def _tell_once_a_machine(message: str) -> None:
    """Every rank of a launched job finds the same mistake; one voice a machine is enough."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        _tell(message)


def _tell(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
