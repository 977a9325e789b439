"""What is refused before a search, and what is written beside a plan's page."""

import dataclasses
import random

import pytest
from planning.outcomes import outcome, report
from planning.small_problems import small_model

from gt_trainer.launcher.launch_scripts import launch_scripts
from gt_trainer.planning import plan_run
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.plan_run import PlanQuestion, cluster_run, make_plan


def test_a_batch_of_no_whole_sequences_is_told_with_the_nearest(monkeypatch):
    model = dataclasses.replace(small_model(random.Random(0)), seq_len=4096)
    monkeypatch.setattr(plan_run, "check_plannable", lambda config, asked: None)
    monkeypatch.setattr(plan_run, "counted_model", lambda config: model)
    question = PlanQuestion(
        cluster=load_cluster("h100_sxm"),
        num_gpus=8,
        global_batch_tokens=10_000,
        what_if={},
        fixed={},
        model_flags="",
    )
    with pytest.raises(NoRecipeError) as raised:
        make_plan(None, question)
    assert str(raised.value) == (
        "--global-batch-tokens 10000 is no multiple of the 4096 tokens of a sequence: the nearest "
        "is 8192"
    )


def test_scripts_start_the_fastest_recipe_on_whole_hosts():
    started = cluster_run(report((outcome(8),), (outcome(4, ms=1250.0),)), "my plan;")
    assert started is not None
    assert (started.name, started.num_nodes, started.gpus_per_node) == ("my_plan_", 1, 8)
    text = launch_scripts(started)["my_plan_.torchrun.sh"]
    assert "# llama3 8B on 8 H100 SXM: dp_shard 8 | 1 x 1 seq selective. Start it" in text
    assert (
        "    -m gt_trainer --module llama3 --config llama3_8b --training.seq_len 8192 "
        "--parallelism.data_parallel_replicate_degree 1 "
    ) in text


def test_an_nvlink_domain_of_many_hosts_is_started_host_by_host():
    found = report((outcome(8),))
    four = dataclasses.replace(found.cluster, gpus_per_host=4)
    started = cluster_run(dataclasses.replace(found, cluster=four), "plan")
    assert started is not None
    assert (started.num_nodes, started.gpus_per_node) == (2, 4)


def test_gpus_that_are_no_whole_hosts_have_no_scripts():
    assert cluster_run(dataclasses.replace(report((outcome(8),)), num_gpus=12), "plan") is None


def test_nodes_of_an_nvlink_domain_are_asked_for_together():
    found = report((outcome(8),))
    four = dataclasses.replace(found.cluster, gpus_per_host=4)
    started = cluster_run(dataclasses.replace(found, cluster=four), "plan")
    slurm, torchrun = launch_scripts(started).values()
    assert "#SBATCH --segment=2\n" in slurm
    assert (
        "# torchrun numbers nodes by their sorted names: those of the 2 in an NVLink domain have to "
        "be next to one another.\n"
    ) in torchrun


def test_folders_that_were_asked_for_need_no_variable():
    further = ("--hf-assets-path=a b", "--training.seq_len", "8192", "--dump_folder", "out")
    started = cluster_run(dataclasses.replace(report((outcome(8),)), further=further), "plan")
    for text in launch_scripts(started).values():
        assert "HF_ASSETS_PATH" not in text
        assert "DUMP_FOLDER" not in text
        assert "'--hf-assets-path=a b' --training.seq_len 8192 --dump_folder out " in text


def test_a_machines_name_cannot_leave_its_comment():
    found = report((outcome(8),))
    hardware = dataclasses.replace(found.cluster.hardware, name="my\ntouch x")
    cluster = dataclasses.replace(found.cluster, hardware=hardware)
    started = cluster_run(dataclasses.replace(found, cluster=cluster), "plan")
    assert all("\ntouch" not in text for text in launch_scripts(started).values())
