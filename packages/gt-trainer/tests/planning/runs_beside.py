"""Runs of two small layers to simulate beside a plan, in a file that another process can import."""

import dataclasses

from gt_passes.simulation import h100_sxm
from gt_trainer.command_line.command_line import flags_given
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.device import intended_for
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.planning.run_beside import (
    RunBeside,
    checked_beside,
    finish_beside,
    start_beside,
)
from gt_trainer.preflight.settled_defaults import settle_defaults

GPUS, SEQUENCES = 4, 8
PARALLELISM = "--parallelism."


def _two_layers():
    config = llama3_debugmodel()
    spec = config.model_spec
    model = dataclasses.replace(spec.model, layers=spec.model.layers[:2])
    return dataclasses.replace(config, model_spec=dataclasses.replace(spec, model=model))


def _run(*flags) -> RunBeside:
    flags = ("--training.seq_len", "64", "--training.local_batch_size", "2", *flags)
    with intended_for("cuda"):
        config = apply_overrides(_two_layers(), flags)
    return RunBeside(flags=flags, asked=flags_given(flags), config=config)


def checked(*flags) -> RunBeside:
    return checked_beside(_run(*flags), GPUS, SEQUENCES)


def simulated_both_ways(*flags):
    """Beside a plan, and by a dry run; called in a process that has captured nothing itself."""
    run = checked(*flags)
    child = start_beside(run, GPUS, h100_sxm())
    found = finish_beside(run, GPUS, child, tell=print, is_stopped=lambda: False)
    return found, _dry_run(run.flags)


def _dry_run(flags):
    with intended_for("cuda"):
        config = apply_overrides(_two_layers(), flags)
        config, _ = settle_defaults(config, GPUS, asked=flags_given(flags))
        simulated = dry_run(config, GPUS, hardware=h100_sxm()).simulated
    return simulated.step_us, simulated.peak_bytes
