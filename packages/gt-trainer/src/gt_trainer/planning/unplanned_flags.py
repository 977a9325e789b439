"""Settings with which the bounds of a search would be none, so that no plan is made with them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from gt_trainer.planning.candidates import NoRecipeError

if TYPE_CHECKING:
    from gt_trainer.trainer import GraphTrainer

_LAYOUT = "bounds are of stages as the other flags lay them out"
_PASSES = "bounds are of graphs as the passes of the mode leave them"

UNPLANNED: dict[str, tuple[object, str]] = {
    "--compile.mode": ("aot_fx_trace", "only captured graphs are simulated"),
    "--compile.autoparallel": (False, "bounds are of the placement that torchtitan publishes"),
    "--compile.disable_passes": ((), _PASSES),
    "--compile.fsdp_second_group": (False, "bounds are of one stream for each process group"),
    "--compile.full_recompute_saved_ops": ((), "bounds are of layers that are computed again"),
    "--compile.passes": ((), _PASSES),
    "--parallelism.module_fqns_per_model_part": (None, _LAYOUT),
    "--parallelism.pipeline_parallel_balance": ("layers", _LAYOUT),
    "--parallelism.pipeline_parallel_first_stage_less_layers": (1, _LAYOUT),
    "--parallelism.pipeline_parallel_last_stage_less_layers": (1, _LAYOUT),
    "--parallelism.pipeline_parallel_layers_per_stage": (None, _LAYOUT),
    "--parallelism.pipeline_parallel_schedule_csv": ("", "a plan chooses the schedule"),
    "--quantization.experts": ("none", "bounds of experts are those of the run's own precision"),
    "--training.enable_cpu_offload": (False, "bounds are of states that GPUs hold"),
}
"""The value of each that a plan can be made with, and why no other."""

_SKIP = "--quantization.skip"
_LAST = "lm_head"


def check_plannable(config: GraphTrainer.Config, *, asked: Collection[str] = ()) -> None:
    """Refuse what bounds do not hold for.

    Args:
        config: with the flags that every recipe has.
        asked: the flags of ``config`` that the user gave.

    Raises:
        NoRecipeError: names every such flag, and why.
    """
    problems = list(_problems(config, asked))
    if problems:
        listed = "\n  ".join(problems)
        raise NoRecipeError(f"no plan can be made with these settings:\n  {listed}")


def _problems(config: GraphTrainer.Config, asked: Collection[str]) -> Iterator[str]:
    for flag, (planned, reason) in UNPLANNED.items():
        value = operator.attrgetter(flag.removeprefix("--"))(config)
        if value != planned:
            yield f"{flag} is {value!r}, and must be {planned!r}: {reason}"
    skip = config.quantization.skip
    if (skip or _SKIP in asked) and _LAST not in skip:
        yield (
            f"{_SKIP} is {skip!r}, and must have {_LAST!r}: bounds of the projection to logits are "
            "those of the run's own precision"
        )
    for group in config.optimizer.param_groups:
        if group.optimizer_name not in ("Adam", "AdamW"):
            yield (
                f"the optimizer is {group.optimizer_name!r}, and must be Adam or AdamW: bounds are "
                "of their states"
            )
