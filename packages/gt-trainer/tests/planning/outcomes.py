"""Outcomes and reports made by hand."""

from gt_trainer.dry_run.step_over_time import (
    Bar,
    HeldAt,
    MemoryOverStep,
    StepTimeline,
    TimelineRow,
)
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.plan_answer import PlanAnswer
from gt_trainer.planning.planner import SearchedPlan
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.scaling_curve import ScalingPoint

GIB = 2**30


def outcome(dp_shard=8, *, ms=1000.0, gib=40, moved=None, **changed) -> RecipeOutcome:
    """Of a recipe that is told apart by its degree."""
    recipe = RunRecipe(
        dp_shard=dp_shard,
        dp_replicate=8 // dp_shard,
        microbatch=1,
        global_batch=8,
        memory_policy="selective",
    )
    values = {
        "recipe": recipe,
        "step_us": ms * 1000,
        "tokens_per_second_per_gpu": 8e6 / ms,
        "mfu": 0.4,
        "computing_us": ms * 800,
        "exposed_us": {"FSDP unshard": ms * 150},
        "bubble": 0.0,
        "optimizer_us": ms * 50,
        "memory": {"optimizer state": gib * GIB},
        "memory_over_step": over_step(gib, ms=ms),
        "timeline": timeline(ms=ms),
        "peak_bytes": gib * GIB,
        "capacity_bytes": 74 * GIB,
        "moved": moved or {"network 30% slower": ms * 1100},
    }
    return RecipeOutcome(**(values | changed))


def scaling() -> tuple[ScalingPoint, ...]:
    """Two sizes; of the larger one nothing was simulated, and none divides the fixed batch."""

    def point(num_gpus, tokens, *, grows, **found) -> ScalingPoint:
        return ScalingPoint(
            num_gpus=num_gpus,
            global_batch_tokens=tokens,
            grows=grows,
            **{"least_us": 1e4 * tokens / 8192, "simulated": None, **found},
        )

    return (
        point(64, 524_288, grows=True, simulated=outcome(8)),
        point(256, 2_097_152, grows=True),
        point(64, 65_536, grows=False, simulated=outcome(4, ms=2000.0)),
        point(256, 65_536, grows=False, least_us=None),
    )


def over_step(gib, *, ms) -> MemoryOverStep:
    """That rises to so much in the middle."""
    held = [(0.0, 0.5), (ms * 500, 1.0), (ms * 600, 0.5)]
    moments = tuple(
        HeldAt(
            start_us=start,
            held={
                "optimizer state": int(gib * GIB / 4),
                "activations": int((part - 0.25) * gib * GIB),
            },
        )
        for start, part in held
    )
    return MemoryOverStep(moments=moments, end_us=ms * 1000, what="the step")


def timeline(*, ms) -> StepTimeline:
    """One rank, whose backward waits."""
    bars = [(0.0, 0.4, "forward"), (0.5, 0.9, "backward"), (0.9, 1.0, "optimizer")]
    row = TimelineRow(
        name="rank 0",
        bars=tuple(
            Bar(start_us=a * ms * 1e3, end_us=b * ms * 1e3, kind=kind) for a, b, kind in bars
        ),
    )
    return StepTimeline(rows=(row,), end_us=ms * 1e3, what="a step, on the ranks of a pipeline")


def report(
    *outcomes, num_left=0, machines=1, refusals=(), scaling=(), has_all_candidates=True
) -> PlanAnswer:
    """Of a plan that simulated these; each has the outcomes on all machines."""
    cluster = load_cluster("h100_sxm")
    relaxed = cluster.with_relaxed({"nic": 800}).hardware
    return PlanAnswer(
        model="llama3 8B",
        cluster=cluster,
        num_gpus=8,
        global_batch_tokens=65_536,
        plan=SearchedPlan(
            machines=(cluster.hardware, relaxed)[:machines],
            outcomes=tuple(outcomes),
            has_all_candidates=has_all_candidates,
            num_candidates=100,
            num_without_memory=20,
            num_cut=90,
            num_left=num_left,
            least_us=1e5,
            refusals=refusals,
            failures=(),
            seconds=12.0,
        ),
        model_flags="--module llama3 --config llama3_8b",
        further=("--training.seq_len", "8192"),
        scaling=scaling,
    )
