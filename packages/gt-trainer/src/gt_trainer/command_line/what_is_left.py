"""What a run leaves behind: where its results are, or what a run that was ended goes on from."""

from __future__ import annotations

from pathlib import Path

from torchtitan.tools import filesystem

from gt_trainer.metrics.metrics_history import METRICS_FILE, read_metrics
from gt_trainer.preflight.checkpoint_folder import can_be_resumed
from gt_trainer.step_folders import newest_checkpoint
from gt_trainer.trainer import GraphTrainer


def results_of(config: GraphTrainer.Config) -> str:
    """Return where the results of a finished run are, as far as they are there, in lines."""
    folder, steps = Path(config.dump_folder), config.training.steps
    trained = read_metrics(folder / METRICS_FILE)
    last = trained[-1]["step"] if trained else steps
    lines = [f"gt-train: finished {steps} steps"]
    if last < steps:
        lines = [f"gt-train: ended at step {last} of {steps}, where the data did"]
    if (folder / METRICS_FILE).exists():
        lines.append(f"  metrics:    {folder / METRICS_FILE}")
    newest = newest_checkpoint(_folder(config)) if config.checkpoint.enable else None
    if newest is not None:
        lines.append(f"  checkpoint: {newest}")
    return "\n".join(lines)


def left_by_ended(config: GraphTrainer.Config) -> str:
    """Return what is left of a run that a signal ended, in one line."""
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        return "  nothing was saved: --checkpoint.enable keeps what a run has reached"
    folder = filesystem.join(config.dump_folder, checkpoint.folder)
    if filesystem.is_remote(folder):
        return f"  what was saved is in {folder}"
    newest = newest_checkpoint(Path(folder))
    if newest is None:
        return f"  nothing is left to go on from: no checkpoint is complete in {folder}"
    resumes = checkpoint.load_step == -1 and can_be_resumed(newest, checkpoint)
    return f"  the newest checkpoint is {newest}" + (
        ": the same command goes on from it" if resumes else ""
    )


def _folder(config: GraphTrainer.Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder
