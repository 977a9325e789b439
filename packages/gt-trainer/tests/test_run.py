"""How a run ends that cannot write, or is interrupted while it writes."""

import errno
import logging
import os
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ParallelismConfig

from gt_autoparallel import JudgedStep
from gt_config import CompileConfig, Fingerprint
from gt_trainer import run
from gt_trainer.dry_run import dry_run
from gt_trainer.launcher import RunStoppedError
from gt_trainer.metrics.metrics_history import MetricsFileError
from gt_trainer.models import llama3
from gt_trainer.placement import judged_run
from gt_trainer.placement.pipeline_judgement import (
    PipelineJudgement,
    digest_of,
    written_judgement,
)


class Interrupting(dcp.FileSystemWriter):
    """A disk on which writing meets what the test says."""

    def __init__(self, folder, error):
        super().__init__(folder)
        self.error = error

    def write_data(self, plan, planner):
        raise self.error


def saving(folder, error):
    """A configuration whose training is a save by PyTorch that meets ``error``."""

    def train():
        writer = Interrupting(folder / "checkpoint" / "step-2", error)
        dcp.save({"weight": torch.ones(3)}, storage_writer=writer)

    return running(folder, train)


def running(folder, train):
    trainer = SimpleNamespace(train=train, close=lambda: None)
    return SimpleNamespace(
        dump_folder=str(folder),
        checkpoint=CheckpointManager.Config(enable=True),
        parallelism=ParallelismConfig(),
        compile=CompileConfig(),
        build=lambda: trainer,
    )


def complete_checkpoint(folder, step):
    states = {"weight": torch.ones(3), "optimizer": {"lr": 1.0}, "train_state": {"step": step}}
    dcp.save(states, checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestSaving:
    def test_ctrl_c_while_saving_is_ctrl_c(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            run.train(saving(tmp_path, KeyboardInterrupt()))

    def test_a_full_disk_is_named_with_what_to_do(self, tmp_path):
        complete_checkpoint(tmp_path, 1)
        with pytest.raises(run.DiskFullError) as stopped:
            run.train(saving(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert str(stopped.value) == (
            f"the disk is full: nothing more can be written to {tmp_path}\n"
            "  Free some space, or choose a --dump_folder on another disk.\n"
            f"  Cut off while being saved, delete: {tmp_path / 'checkpoint' / 'step-2'}\n"
            f"  The same command then goes on from {tmp_path / 'checkpoint' / 'step-1'}"
        )

    def test_only_what_is_cut_off_is_to_be_deleted_and_weights_alone_are_not_gone_on_from(
        self, tmp_path
    ):
        complete_checkpoint(tmp_path, 1)
        steps = tmp_path / "checkpoint"
        for step in (10, 11):
            (steps / f"step-{step}").mkdir()
        (steps / "step-11" / "model.safetensors.index.json").touch()
        with pytest.raises(run.DiskFullError) as stopped:
            run.train(saving(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert str(stopped.value).splitlines()[2:] == [
            f"  Cut off while being saved, delete: {steps / 'step-2'}, {steps / 'step-10'}"
        ]

    @pytest.mark.parametrize("flags", [{"enable": False}, {"enable": True, "load_step": 1}])
    def test_the_newest_is_not_gone_on_from_where_the_command_does_not_resume_it(
        self, tmp_path, flags
    ):
        complete_checkpoint(tmp_path, 1)
        config = saving(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        config.checkpoint = CheckpointManager.Config(**flags)
        with pytest.raises(run.DiskFullError) as stopped:
            run.train(config)
        assert "goes on from" not in str(stopped.value)

    def test_a_full_disk_is_known_by_its_free_space_where_torch_hides_the_error(
        self, tmp_path, monkeypatch
    ):
        config = saving(tmp_path, RuntimeError("unexpected pos 704 vs 598"))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
        with pytest.raises(run.DiskFullError):
            run.train(config)

    def test_another_failure_keeps_the_traceback_of_its_rank(self, tmp_path):
        with pytest.raises(run.CheckpointFailedError, match=r"(?s)RANK 0.*write_data.*no such"):
            run.train(saving(tmp_path, ValueError("no such")))


def test_a_full_disk_is_named_for_other_files_too(tmp_path):
    def train():
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise MetricsFileError("cannot write metrics.jsonl") from full

    with pytest.raises(run.DiskFullError):
        run.train(running(tmp_path, train))


def test_other_errors_of_the_system_stay_what_they_are(tmp_path):
    def train():
        raise FileNotFoundError("no such file")

    with pytest.raises(FileNotFoundError):
        run.train(running(tmp_path, train))


class TestSearchForAPlan:
    """A search that is not done in half of the time that other ranks wait for the first one."""

    def plan_of(self, folder, search, monkeypatch):
        """The file of the plan that the run goes on with."""
        config = llama3.llama3_debugmodel()
        config.dump_folder = str(folder)
        config.compile = replace(config.compile, autoparallel=True)
        config.comm.init_timeout_seconds = 1
        monkeypatch.setattr(dry_run, "plan_before_training", search)
        return run._with_plan(config, None).compile.autoparallel_solver.plan

    def test_the_best_plan_yet_is_taken_and_that_is_said(self, tmp_path, monkeypatch, caplog):
        def search(config, world_size, *, best_path, hardware):
            best_path.write_text("the best plan yet")
            time.sleep(60)

        plan = tmp_path / "placement.json"
        assert self.plan_of(tmp_path, search, monkeypatch) == str(plan)
        assert plan.read_text() == "the best plan yet"
        assert list(tmp_path.iterdir()) == [plan]
        assert caplog.messages[-1] == (
            "The plan is the best that was found in half of --comm.init_timeout_seconds, which is "
            "not enough to find and simulate all rivals. A dry run does, and writes a plan for "
            "--compile.autoparallel_solver.plan"
        )

    def test_without_one_the_run_searches_by_prices_whatever_was_found_before(
        self, tmp_path, monkeypatch, caplog
    ):
        (tmp_path / "placement.json").write_text("the plan of another run")
        (tmp_path / ".placement.json.best").write_text("the best plan of a run that was killed")

        def search(config, world_size, *, best_path, hardware):
            time.sleep(60)

        assert self.plan_of(tmp_path, search, monkeypatch) is None
        assert caplog.messages[-1] == (
            "The plan is the cheapest by its prices, and has no rivals: none was found in half of "
            "--comm.init_timeout_seconds, which is not enough to find and simulate all rivals. A "
            "dry run does, and writes a plan for --compile.autoparallel_solver.plan"
        )

    def test_a_search_in_time_leaves_no_other_file(self, tmp_path, monkeypatch):
        def search(config, world_size, *, best_path, hardware):
            best_path.write_text("the best plan yet")
            best_path.with_name("placement.json").write_text("the plan")

        plan = tmp_path / "placement.json"
        assert self.plan_of(tmp_path, search, monkeypatch) == str(plan)
        assert plan.read_text() == "the plan"
        assert list(tmp_path.iterdir()) == [plan]


class TestJudgementOfAPipeline:
    """Which of its two configurations a pipeline trains with, as its first rank says."""

    RUN = Fingerprint.of({"world_size": 1})
    PLANNED = JudgedStep(step_us=2e6, peak_bytes=1, fits=True)
    FASTER = PipelineJudgement(planned=PLANNED, by_hand=replace(PLANNED, step_us=1e6), made_for=RUN)
    SLOWER = replace(FASTER, by_hand=replace(PLANNED, step_us=3e6))

    def trained(self, folder, judge, monkeypatch, *, may_go_by_hand=True):
        """The configuration that is trained with, and what is kept of its judgement."""
        found = []

        def build(config):
            def keep_judgement(written):
                found.append(written)

            found.append(config)
            return SimpleNamespace(
                train=lambda: None, close=lambda: None, keep_judgement=keep_judgement
            )

        config = llama3.llama3_debugmodel()
        config.dump_folder = str(folder)
        config.checkpoint.enable = True
        config.parallelism.pipeline_parallel_degree = 2
        config.comm.init_timeout_seconds = 60 if judge is not times_out else 1
        by_hand = replace(config)
        config.compile = replace(config.compile, autoparallel=True)
        monkeypatch.setattr(run, "describe_run", lambda _, world_size: f"a run of {world_size}")
        monkeypatch.setattr(judged_run, "judged_run", lambda *_: self.RUN)
        monkeypatch.setattr(dry_run, "judge_before_training", judge)
        monkeypatch.setattr(type(config), "build", build)
        run.train(config, by_hand=by_hand if may_go_by_hand else None)
        assert found[0].compile.autoparallel is (len(found) == 1)
        return found

    @pytest.fixture(autouse=True)
    def gloo(self, tmp_path, monkeypatch, caplog):
        """The process group that ranks agree in, of one rank."""
        caplog.set_level(logging.INFO)
        monkeypatch.setenv("LOCAL_RANK", "0")
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        if dist.is_initialized():
            dist.destroy_process_group()

    def test_the_step_by_hand_is_taken_and_its_judgement_kept(self, tmp_path, monkeypatch, caplog):
        found = self.trained(tmp_path, lambda *_, **__: self.FASTER, monkeypatch)
        assert found[1:] == [written_judgement(self.FASTER)]
        assert "pipeline: by hand 1,000.0 ms is faster than the plan's 2,000.0 ms: taken" in (
            caplog.messages
        )

    def test_the_plan_is_taken_from_the_file_of_its_search(self, tmp_path, monkeypatch, caplog):
        plan = tmp_path / "placement.json"

        def judge(*_, **__):
            plan.touch()
            return self.SLOWER

        (config,) = self.trained(tmp_path, judge, monkeypatch)
        assert config.compile.autoparallel_solver.plan == str(plan)
        assert "pipeline: the plan's 2,000.0 ms are taken, by hand 3,000.0 ms" in caplog.messages

    def test_a_plan_that_could_not_be_judged_in_time_is_taken(self, tmp_path, monkeypatch, caplog):
        (tmp_path / "placement.json").write_text("the plan of another run")
        (config,) = self.trained(tmp_path, times_out, monkeypatch)
        assert config.compile.autoparallel_solver.plan is None
        assert (
            "pipeline: the plan is taken; half of --comm.init_timeout_seconds is not enough to "
            "simulate it beside the step by hand. A dry run with this --dump_folder "
            "does, and leaves there what a start then goes by"
        ) in caplog.messages

    def test_what_was_judged_before_is_not_judged_again(self, tmp_path, monkeypatch, caplog):
        complete_checkpoint(tmp_path, 1)
        kept = tmp_path / "checkpoint" / "placed_by_hand.json"
        kept.write_bytes(written_judgement(self.FASTER))
        found = self.trained(tmp_path, None, monkeypatch)
        assert found[1:] == [written_judgement(self.FASTER)]
        assert f"{self.FASTER}, kept in {kept}" in caplog.messages
        assert "By hand, unlike what was said above: a run of 1" in caplog.messages

    def test_what_a_dry_run_found_is_not_judged_again(self, tmp_path, monkeypatch, caplog):
        left = tmp_path / "pipeline_judgement.json"
        left.write_bytes(written_judgement(self.FASTER))
        found = self.trained(tmp_path, None, monkeypatch)
        assert found[1:] == [written_judgement(self.FASTER)]
        assert f"{self.FASTER}, found by the dry run that wrote {left}" in caplog.messages

    def test_a_plan_that_a_dry_run_took_is_not_judged_again(self, tmp_path, monkeypatch, caplog):
        plan, left = tmp_path / "placement.json", tmp_path / "pipeline_judgement.json"
        plan.write_bytes(b"the plan")
        judged = replace(self.SLOWER, plan_digest=digest_of(b"the plan"))
        left.write_bytes(written_judgement(judged))
        monkeypatch.setattr(run, "plan_problem", lambda *_: None)
        (config,) = self.trained(tmp_path, None, monkeypatch)
        assert config.compile.autoparallel_solver.plan == str(plan)
        assert plan.read_bytes() == b"the plan"
        assert f"{judged}, found by the dry run that wrote {left}" in caplog.messages

    @pytest.mark.parametrize("plan_file", [None, b"that of another search"])
    def test_a_plan_that_is_not_the_one_that_a_dry_run_took_is_judged(
        self, tmp_path, monkeypatch, caplog, plan_file
    ):
        plan, left = tmp_path / "placement.json", tmp_path / "pipeline_judgement.json"
        if plan_file is not None:
            plan.write_bytes(plan_file)
        left.write_bytes(
            written_judgement(replace(self.SLOWER, plan_digest=digest_of(b"the plan")))
        )
        found = self.trained(tmp_path, lambda *_, **__: self.FASTER, monkeypatch)
        assert found[1:] == [written_judgement(self.FASTER)]
        assert (
            f"{left} takes a plan that is not, or no longer, {plan}: plan and step by hand are "
            "compared again"
        ) in caplog.messages
        assert not plan.exists()

    def test_a_plan_that_a_dry_run_took_and_that_is_not_for_this_run_is_judged(
        self, tmp_path, monkeypatch, caplog
    ):
        plan, left = tmp_path / "placement.json", tmp_path / "pipeline_judgement.json"
        plan.write_bytes(b"the plan")
        judged = replace(self.SLOWER, plan_digest=digest_of(b"the plan"))
        left.write_bytes(written_judgement(judged))
        monkeypatch.setattr(run, "plan_problem", lambda path, *_: f"{path.name}: planned for 8")
        found = self.trained(tmp_path, lambda *_, **__: self.FASTER, monkeypatch)
        assert found[1:] == [written_judgement(self.FASTER)]
        assert (
            f"{plan} is not for this run: plan and step by hand are compared again. "
            "placement.json: planned for 8"
        ) in caplog.messages

    def test_a_plan_that_a_dry_run_took_in_another_budget_is_judged(
        self, tmp_path, monkeypatch, caplog
    ):
        plan, left = tmp_path / "placement.json", tmp_path / "pipeline_judgement.json"
        plan.write_bytes(b"the plan")
        judged = replace(self.SLOWER, budget_bytes=2**30, plan_digest=digest_of(b"the plan"))
        left.write_bytes(written_judgement(judged))
        self.trained(tmp_path, lambda *_, **__: self.FASTER, monkeypatch)
        assert (
            f"{left} judges a plan that was found for another memory budget: plan and step by hand "
            "are compared again"
        ) in caplog.messages

    def test_what_a_dry_run_found_of_another_run_is_judged_again(
        self, tmp_path, monkeypatch, caplog
    ):
        left = tmp_path / "pipeline_judgement.json"
        left.write_bytes(
            written_judgement(replace(self.FASTER, made_for=Fingerprint.of({"world_size": 2})))
        )
        (config,) = self.trained(tmp_path, lambda *_, **__: self.SLOWER, monkeypatch)
        assert config.compile.autoparallel
        assert (
            f"{left} is of another run; stale: 1 field differs between what is stored and this "
            "run:\n  world_size: 2 became 1: plan and step by hand are compared again"
        ) in caplog.messages

    def test_a_plan_that_was_found_is_taken_where_the_step_by_hand_fails(
        self, tmp_path, monkeypatch, caplog
    ):
        plan = tmp_path / "placement.json"

        def judge(*_, **__):
            plan.touch()
            raise ValueError("no such stage")

        (config,) = self.trained(tmp_path, judge, monkeypatch)
        assert config.compile.autoparallel_solver.plan == str(plan)
        (warned,) = (each for each in caplog.messages if "could not be simulated" in each)
        assert warned.startswith("pipeline: the plan is taken; the step by hand could not be ")
        assert "no such stage" in warned

    def test_says_that_a_run_by_hand_goes_on_with_a_plan(self, tmp_path, monkeypatch, caplog):
        complete_checkpoint(tmp_path, 1)
        kept = tmp_path / "checkpoint" / "placed_by_hand.json"
        kept.write_bytes(written_judgement(self.FASTER))
        self.trained(tmp_path, None, monkeypatch, may_go_by_hand=False)
        assert (
            f"{kept} says that these checkpoints were made by hand, which the options of this run "
            "do not allow: it goes on with a plan, kept in its place"
        ) in caplog.messages

    def test_stages_are_balanced_in_the_time_that_judging_left(self, tmp_path, monkeypatch):
        spent = []

        def balanced(config, _, *, spent_seconds):
            spent.append(spent_seconds)
            return config

        monkeypatch.setattr(run, "_balanced", balanced)
        self.trained(tmp_path, times_out, monkeypatch)
        assert 0.5 <= spent[0] < 60

    def test_with_a_plan_that_was_kept_nothing_is_judged(self, tmp_path, monkeypatch):
        complete_checkpoint(tmp_path, 1)
        (tmp_path / "checkpoint" / "placement.json").touch()
        (config,) = self.trained(tmp_path, None, monkeypatch)
        assert config.compile.autoparallel

    def test_a_failure_says_how_to_train_without_a_judgement(self, tmp_path, monkeypatch):
        def judge(*_, **__):
            raise ValueError("no such stage")

        with pytest.raises(RunStoppedError, match=r"(?s)no_simulate_rivals.*no such stage"):
            self.trained(tmp_path, judge, monkeypatch)


def times_out(*_, **__):
    time.sleep(60)
