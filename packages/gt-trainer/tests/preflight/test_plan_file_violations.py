"""A plan that is not for the run is refused in the launching process, with what differs."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from refused_configurations import changed, refusal

from gt_autoparallel import JudgedStep, write_plan, write_plans
from gt_config import AutoParallelConfig, Fingerprint, Topology
from gt_passes.simulation import h100_sxm
from gt_trainer.models import llama3
from gt_trainer.pipelines.pipeline_plan import pipeline_plan
from gt_trainer.pipelines.place_stages import StagesToPlace, stage_plans
from gt_trainer.pipelines.planned_stages import stages_of_plan
from gt_trainer.pipelines.split_model import cut_stages
from gt_trainer.placement.expert_blocks import expert_blocks
from gt_trainer.placement.judged_run import judged_run
from gt_trainer.placement.kept_plan import BY_HAND_FILE, by_hand_file_of, keep_plan, plan_file_of
from gt_trainer.placement.pipeline_judgement import PipelineJudgement, written_judgement
from gt_trainer.placement.place_decoder import placement_plan
from gt_trainer.placement.planned_machine import PlannedMachine, planned_for
from gt_trainer.placement.planned_mesh import planned_axes
from gt_trainer.preflight.plan_file_violations import model_on_meta, plan_file_violations
from gt_trainer.preflight.preflight import check_configuration

NUM_RANKS = 4
TOPOLOGY = Topology(world=NUM_RANKS, pp=2, dp_shard=2, batch_size=2, seq_len=32)
PLAN = "--compile.autoparallel_solver.plan"


def configuration(folder, plan=None, *, dims=None, **changes):
    """A placed run of one small layer on 2 x 2 ranks."""
    config = llama3.llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:1]
    config = changed(
        config,
        folder,
        training={"seq_len": 32, "local_batch_size": 2},
        parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
        compile={"autoparallel": True, "autoparallel_solver": AutoParallelConfig(plan=plan)},
    )
    return changed(config, folder, **changes)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """The file of a plan of that run."""
    folder = tmp_path_factory.mktemp("planned")
    config = configuration(folder)
    model = model_on_meta(config)
    found = placement_plan(
        model,
        planned_axes(dp_replicate=1, dp_shard=2, tp=2, ep=1),
        expert_blocks(model),
        training=config.training,
        solver=AutoParallelConfig(relative_gap=0.9),  # any plan will do
    )
    return write_plan(found, folder / "placement.json")


def problem(config) -> str:
    """What is said of the plan, the file's name cut out of it."""
    return refusal(config, NUM_RANKS).replace(config.compile.autoparallel_solver.plan or "", "PLAN")


def wrong(text: str) -> str:
    return (
        "the configuration has 1 problem:\n"
        f"  1. {PLAN} is 'PLAN'\n"
        "     allowed: the file of a plan for this model, mesh, batch and machine\n"
        f"     fix: {text}\n"
        "     Give another file, or leave the flag out to search for a plan"
    )


SOMETHING_ELSE = "the plan was made for something else; plan again:"


def test_a_plan_is_for_the_machine_that_hardware_describes(plan, tmp_path):
    mine = dataclasses.replace(h100_sxm(), name="mine")
    with planned_for(PlannedMachine(hardware=mine)):
        assert "the plan was made with other prices: digest" in problem(
            configuration(tmp_path, str(plan))
        )
        model = model_on_meta(configuration(tmp_path))
        found = placement_plan(
            model,
            planned_axes(dp_replicate=1, dp_shard=2, tp=2, ep=1),
            expert_blocks(model),
            training=configuration(tmp_path).training,
            solver=AutoParallelConfig(plan=None, relative_gap=0.9),
        )
        made = write_plan(found, tmp_path / "mine.json")
        check_configuration(configuration(tmp_path, str(made)), NUM_RANKS)
    assert "with other prices" in problem(configuration(tmp_path, str(made)))


def test_the_plan_of_such_a_run_is_accepted(plan, tmp_path):
    check_configuration(configuration(tmp_path, str(plan)), NUM_RANKS)
    check_configuration(configuration(tmp_path, str(plan)), NUM_RANKS, will_train=False)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert problem(configuration(tmp_path / "run", str(tmp_path / "no.json"))) == wrong(
        "[Errno 2] No such file or directory: 'PLAN'"
    )


def test_a_file_that_was_cut_off_is_refused(plan, tmp_path):
    short = tmp_path / "short.json"
    short.write_bytes(plan.read_bytes()[:5000])
    found = problem(configuration(tmp_path / "run", str(short)))
    assert "fix: PLAN is damaged or no plan: " in found


def edited(plan, folder, edit) -> str:
    """A copy of the file with another content, and a digest of it."""
    document = json.loads(plan.read_bytes())
    edit(document["content"])
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "other.json").write_text(json.dumps(document))
    return str(folder / "other.json")


def test_a_file_with_unknown_fields_is_refused(plan, tmp_path):
    other = edited(plan, tmp_path, lambda content: content["mesh"].update(speed=1))
    assert problem(configuration(tmp_path / "run", other)) == wrong(
        "PLAN has fields that no plan has: content.mesh.speed"
    )


def test_a_plan_for_another_machine_is_refused(plan, tmp_path):
    other = edited(plan, tmp_path, lambda content: content.update(prices_digest="of others"))
    found = problem(configuration(tmp_path / "run", other))
    assert (
        "fix: PLAN: the plan was made with other prices: digest 'of others', those given" in found
    )


def test_a_plan_of_another_model_is_refused(plan, tmp_path):
    config = configuration(tmp_path, str(plan))
    config.model_spec.model.layers = llama3.llama3_debugmodel().model_spec.model.layers[:2]
    found = problem(config)
    assert found.startswith(wrong(SOMETHING_ELSE).partition("\n     Give")[0])
    assert "\n       - layers.1.attention" in found
    assert " was not planned\n       - and " in found


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        (
            {"parallelism": {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 1}},
            ["mesh is fsdp 4, planned for tp 2 x fsdp 2"],
        ),
        (
            {"training": {"local_batch_size": 4}},
            [
                "input tokens is int64[8, 32], planned for int64[4, 32]",
                "input positions is int64[8, 32], planned for int64[4, 32]",
            ],
        ),
    ],
    ids=["mesh", "batch"],
)
def test_a_plan_of_another_run_is_refused(plan, tmp_path, changes, differences):
    found = problem(configuration(tmp_path, str(plan), **changes))
    for line in differences:
        assert f"\n       - {line}" in found


def test_a_plan_that_exceeds_the_budget_is_refused(plan, tmp_path):
    config = configuration(tmp_path, str(plan))
    made_for = 2.0**-11
    other = edited(
        plan,
        tmp_path,
        lambda content: content["request"].update(memory_budget_bytes=int(made_for * 2**30)),
    )
    solver = AutoParallelConfig(plan=other, memory_budget_gib=made_for)
    config.compile = dataclasses.replace(config.compile, autoparallel_solver=solver)
    assert "bytes of memory on each rank, and 524,288 are allowed" in problem(config)


def test_a_plan_for_another_budget_is_refused_though_it_keeps_it(plan, tmp_path):
    config = configuration(tmp_path, str(plan))
    solver = AutoParallelConfig(plan=str(plan), memory_budget_gib=2.0)
    config.compile = dataclasses.replace(config.compile, autoparallel_solver=solver)
    made_for = json.loads(plan.read_bytes())["content"]["request"]["memory_budget_bytes"]
    assert problem(config) == wrong(
        f"{SOMETHING_ELSE}\n"
        f"       - the memory budget is {2 * 2**30:,} bytes on each rank, planned for "
        f"{made_for:,} bytes"
    )


def test_a_plan_for_steps_of_one_microbatch_is_refused_where_gradients_add_up(plan, tmp_path):
    config = configuration(tmp_path, str(plan), training={"global_batch_size": 8})
    assert problem(config) == wrong(
        f"{SOMETHING_ELSE}\n"
        "       - several microbatches add up gradients, planned for a run in which each step "
        "makes new gradients"
    )


# ---- plans of stages --------------------------------------------------------------------------


STAGES = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "lm_head"]]


def piped(folder, plan=None, **parallelism):
    """A placed run of three layers on two stages of two ranks."""
    config = configuration(
        folder,
        plan,
        parallelism={
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "1F1B",
            "tensor_parallel_degree": 1,
            **parallelism,
        },
    )
    config.model_spec.model.layers = llama3.llama3_debugmodel().model_spec.model.layers[:3]
    return config


@pytest.fixture(scope="module")
def stage_plan(tmp_path_factory) -> Path:
    """The file of the plans of two stages, which are not those by number of layers."""
    folder = tmp_path_factory.mktemp("stages")
    config = piped(folder, module_fqns_per_model_part=STAGES)
    model = model_on_meta(config)
    plan = pipeline_plan(config.parallelism, num_layers=3, local_batch_size=2)
    stages = StagesToPlace(
        plan=plan,
        is_tied=False,
        training=config.training,
        microbatch_size=1,
        solver=AutoParallelConfig(relative_gap=0.9),
    )
    mesh = planned_axes(dp_replicate=1, dp_shard=2, tp=1, ep=1)
    plans = stage_plans(cut_stages(model, plan, range(2)), stages, mesh)
    return write_plans({f"stage {i}": each for i, each in plans.items()}, folder / "plans.json")


def test_stages_that_a_plan_file_names_are_those_of_a_run_that_lets_them_be_found(
    stage_plan, tmp_path
):
    accepted = piped(tmp_path, str(stage_plan), pipeline_parallel_balance="planned")
    check_configuration(accepted, NUM_RANKS)
    assert stages_of_plan(stage_plan) == STAGES


def test_plans_of_other_stages_are_refused(stage_plan, tmp_path):
    found = problem(piped(tmp_path, str(stage_plan)))
    assert "\n       - layers.1.attention" in found
    assert " was not planned\n" in found
    whole = piped(
        tmp_path, str(stage_plan), pipeline_parallel_degree=1, data_parallel_shard_degree=4
    )
    assert (
        "fix: PLAN has plans of the parts stage 0, stage 1, and none of a whole model"
        in problem(whole)
    )


def test_a_plan_of_a_whole_model_has_no_stages(plan, tmp_path):
    config = piped(tmp_path, str(plan), pipeline_parallel_balance="planned")
    assert "fix: PLAN has the plan of a whole model, and no parts" in problem(config)


# ---- the plan of a run that is gone on with ------------------------------------------------------


def kept(tmp_path, plan, **changes):
    """A run whose folder has a checkpoint of one that had this plan."""
    config = configuration(tmp_path, checkpoint={"enable": True}, **changes)
    (tmp_path / "checkpoint" / "step-2").mkdir(parents=True)
    assert keep_plan(config, plan.read_bytes())
    return config, tmp_path / "checkpoint" / "placement.json"


def test_a_run_without_checkpoints_searches_for_a_plan(plan, tmp_path):
    config, _ = kept(tmp_path, plan)
    assert plan_file_of(config) is None  # step-2 was cut off


def test_a_run_that_goes_on_has_the_plan_that_was_kept(plan, tmp_path):
    config, path = kept(tmp_path, plan)
    (tmp_path / "checkpoint" / "step-2" / ".metadata").touch()
    assert plan_file_of(config) == path
    assert path.read_bytes() == plan.read_bytes()
    assert [each.name for each in path.parent.iterdir() if each.is_file()] == ["placement.json"]
    other = AutoParallelConfig(plan="other.json")
    asked = dataclasses.replace(config.compile, autoparallel_solver=other)
    assert plan_file_of(dataclasses.replace(config, compile=asked)) == Path("other.json")
    by_hand = dataclasses.replace(config.compile, autoparallel=False)
    assert plan_file_of(dataclasses.replace(config, compile=by_hand)) is None


JUDGED = PipelineJudgement(
    planned=JudgedStep(step_us=2e6, peak_bytes=1, fits=True),
    by_hand=JudgedStep(step_us=1e6, peak_bytes=2 * 2**30, fits=True),
    made_for=Fingerprint.of({"world_size": 4}),
)


def judged_for(config):
    """The file of a judgement that was made for a run."""
    made_for = judged_run(config, NUM_RANKS)
    return written_judgement(dataclasses.replace(JUDGED, made_for=made_for))


def by_hand_before(tmp_path, content, **changes):
    """A pipeline whose folder has a checkpoint of one that was judged to be faster by hand."""
    config = piped(tmp_path, None, **changes)
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=True)
    (tmp_path / "checkpoint" / "step-2").mkdir(parents=True)
    (tmp_path / "checkpoint" / "placement.json").touch()
    assert keep_plan(config, content, name=BY_HAND_FILE)
    return config, tmp_path / "checkpoint" / "placed_by_hand.json"


def test_a_pipeline_that_goes_on_is_placed_by_hand_again_and_no_more_judged(tmp_path):
    config, path = by_hand_before(tmp_path, judged_for(piped(tmp_path)))
    assert by_hand_file_of(config) is None  # step-2 was cut off
    (tmp_path / "checkpoint" / "step-2" / ".metadata").touch()
    assert by_hand_file_of(config) == path
    assert plan_file_of(config) is None  # of another run
    assert list(plan_file_violations(config, TOPOLOGY)) == []


@pytest.mark.parametrize(
    ("changes", "solver"),
    [
        ({}, {"plan": "other.json"}),
        ({}, {"simulate_rivals": False}),
        ({"pipeline_parallel_degree": 1, "data_parallel_shard_degree": 4}, {}),
    ],
)
def test_a_run_that_is_not_judged_is_not_placed_by_hand(tmp_path, changes, solver):
    config, _ = by_hand_before(tmp_path, written_judgement(JUDGED), **changes)
    (tmp_path / "checkpoint" / "step-2" / ".metadata").touch()
    options = AutoParallelConfig(**solver)
    config.compile = dataclasses.replace(config.compile, autoparallel_solver=options)
    assert by_hand_file_of(config) is None


def test_what_was_kept_last_is_alone(tmp_path):
    config, path = by_hand_before(tmp_path, written_judgement(JUDGED))
    assert [each.name for each in path.parent.iterdir() if each.is_file()] == [path.name]
    assert keep_plan(config, b"a plan")
    assert [each.name for each in path.parent.iterdir() if each.is_file()] == ["placement.json"]


def test_a_damaged_judgement_is_refused(tmp_path):
    config, path = by_hand_before(tmp_path, b"{")
    (tmp_path / "checkpoint" / "step-2" / ".metadata").touch()
    (found,) = plan_file_violations(config, TOPOLOGY)
    assert (found.flag, found.value) == ("--checkpoint.folder", str(path.parent))
    assert found.allowed == (
        "checkpoints whose judgement, placed_by_hand.json beside them, is for this run"
    )
    assert found.fix == (
        f"{path} does not say how a pipeline was judged\nGive back what differs, or "
        "delete that file, and plan and step by hand are compared again"
    )


def test_a_judgement_holds_for_the_run_that_it_was_made_for(tmp_path):
    config, path = by_hand_before(tmp_path, judged_for(piped(tmp_path)))
    (tmp_path / "checkpoint" / "step-2" / ".metadata").touch()
    assert list(plan_file_violations(config, TOPOLOGY)) == []
    (found,) = plan_file_violations(config, dataclasses.replace(TOPOLOGY, world=8))
    other = f"{path} is of another run; stale: 1 field differs between what is stored and this run:"
    assert found.fix.startswith(f"{other}\n  world_size: 4 became 8\n")
    for part, change, told in [
        ("training", {"seq_len": 64}, 'training["seq_len"]: 32 became 64'),
        ("compile", {"prefetch_layers": 2}, "compile.prefetch_layers: 1 became 2"),
    ]:
        options = dataclasses.replace(getattr(config, part), **change)
        (found,) = plan_file_violations(dataclasses.replace(config, **{part: options}), TOPOLOGY)
        assert found.fix.startswith(f"{other}\n  {told}\n")
    with planned_for(PlannedMachine(hardware=dataclasses.replace(h100_sxm(), gpus_per_node=4))):
        (found,) = plan_file_violations(config, TOPOLOGY)
    assert found.fix.startswith(other)
    solver = dataclasses.replace(config.compile.autoparallel_solver, memory_budget_gib=1.0)
    config.compile = dataclasses.replace(config.compile, autoparallel_solver=solver)
    (found,) = plan_file_violations(config, TOPOLOGY)
    assert found.fix.startswith(
        f"{path} does not take the step by hand for this memory budget: pipeline: the plan's "
        "2,000.0 ms are taken, by hand 1,000.0 ms, which takes 2.00 GiB and so more than asked for"
    )


def test_plans_are_not_kept_beside_remote_checkpoints(tmp_path):
    config = configuration(tmp_path, checkpoint={"enable": True, "folder": "s3://bucket/folder"})
    assert not keep_plan(config, b"")
    assert plan_file_of(config) is None


def test_a_run_that_goes_on_as_another_one_is_refused(plan, tmp_path, monkeypatch):
    config, _ = kept(tmp_path, plan, training={"seq_len": 64})
    (tmp_path / "checkpoint" / "step-2" / ".metadata").touch()
    # Which checkpoints can be loaded is judged elsewhere.
    monkeypatch.setattr(
        "gt_trainer.preflight.machine_violations.check_checkpoints", lambda *_, **__: iter(())
    )
    found = refusal(config, NUM_RANKS)
    assert found == (
        "the configuration has 1 problem:\n"
        "  1. --checkpoint.folder is 'RUN/checkpoint'\n"
        "     allowed: checkpoints whose plan, placement.json beside them, is for this run\n"
        f"     fix: {SOMETHING_ELSE}\n"
        "       - layers.0.attention.rope.cache is complex64[64, 8], planned for complex64[32, 8]\n"
        "       - input tokens is int64[4, 64], planned for int64[4, 32]\n"
        "       - input positions is int64[4, 64], planned for int64[4, 32]\n"
        "       - input attention_masks is bool[4, 1, 64, 64], planned for bool[4, 1, 32, 32]\n"
        f"     Give back what differs, or {PLAN} with another plan; or delete that file, and a "
        "plan is searched for"
    )
