"""Judging the checkpoints that a run would resume from."""

import os
import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager

from gt_trainer.checkpoints.checksums import Checksums
from gt_trainer.model_identity import identity_of, write_identity
from gt_trainer.preflight.checkpoint_folder import check_checkpoints
from gt_trainer.step_folders import newest_checkpoint, step_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One small checkpoint, to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    states = {"weight": torch.zeros(8, 8), "optimizer": {"lr": 1.0}, "train_state": {"step": 1}}
    states["dataloader"] = {"dp_rank_0": b"", "world_size": 1}
    dcp.save(states, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def saved_weights(tmp_path_factory):
    """The same without the state of the run."""
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    dcp.save({"weight": torch.zeros(8, 8)}, checkpoint_id=folder, no_dist=True)
    return folder


@dataclass
class Tiny:
    """What stands for a model's configuration: a weight of ``width`` x ``width``."""

    width: int = 8
    theta: float = 1e4

    def build(self) -> torch.nn.Module:
        return torch.nn.Linear(self.width, self.width, bias=False)


def spec(**fields):
    return SimpleNamespace(name="tiny", flavor="debug", model=Tiny(**fields))


@pytest.fixture
def run_folder(tmp_path, saved):
    """A run with complete checkpoints of steps 5 and 10."""
    for step in (5, 10):
        target = tmp_path / "checkpoint" / f"step-{step}"
        shutil.copytree(saved, target)
    return tmp_path


def problems(run_folder, *, model=None, num_steps=20, num_readers=1, **flags) -> list[str]:
    config = CheckpointManager.Config(enable=True, **flags)
    found = list(
        check_checkpoints(
            config, run_folder, spec=model or spec(), num_steps=num_steps, num_readers=num_readers
        )
    )
    return [str(violation).replace(str(run_folder), "RUN") for violation in found]


def data_file(step_folder):
    return next(path for path in step_folder.iterdir() if path.suffix == ".distcp")


def test_no_checkpoints_and_intact_checkpoints_are_fine(tmp_path, run_folder):
    assert problems(tmp_path / "fresh") == []
    assert problems(run_folder) == []
    assert problems(run_folder, load_step=5) == []
    assert newest_checkpoint(run_folder / "checkpoint").name == "step-10"
    assert newest_checkpoint(tmp_path / "fresh") is None


def test_unreadable_metadata_of_the_newest_is_refused(run_folder):
    metadata = run_folder / "checkpoint" / "step-10" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:20])
    assert problems(run_folder) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint/step-10'\n"
            "allowed: an intact checkpoint\n"
            "fix: .metadata cannot be read (UnpicklingError): delete this folder to resume from an "
            "older one, or choose another --dump_folder"
        )
    ]
    assert problems(run_folder, load_step=5) == []


def test_missing_data_is_refused(run_folder):
    file = data_file(run_folder / "checkpoint" / "step-10")
    file.unlink()
    assert problems(run_folder) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint/step-10'\n"
            "allowed: an intact checkpoint\n"
            f"fix: {file.name} is missing: delete this folder to resume from an older one, or choose "
            "another --dump_folder"
        )
    ]


def test_truncated_data_is_refused(run_folder):
    file = data_file(run_folder / "checkpoint" / "step-10")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    (problem,) = problems(run_folder)
    assert f"{file.name} has 100 bytes of at least {size}: delete this folder" in problem


def test_a_cut_off_save_is_passed_over_with_a_warning_if_an_older_one_is_complete(run_folder):
    (run_folder / "checkpoint" / "step-15").mkdir()
    with pytest.warns(UserWarning, match="cut off while being saved") as warned:
        assert problems(run_folder) == []
    assert str(warned[0].message).replace(str(run_folder), "RUN") == (
        "step-15 in RUN/checkpoint cut off while being saved (no .metadata); resuming from step-10"
    )


def test_after_a_first_save_that_was_cut_off_training_starts_from_its_beginning(tmp_path):
    (tmp_path / "checkpoint" / "step-15").mkdir(parents=True)
    with pytest.warns(UserWarning, match="step-15 in .*no other: training starts from its begin"):
        assert problems(tmp_path) == []


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(run_folder):
    assert problems(run_folder, load_step=7) == [
        (
            "--checkpoint.load_step is 7\n"
            "allowed: a step saved in RUN/checkpoint: 5, 10\n"
            "fix: choose one of these, or leave the flag out for the newest"
        )
    ]


def test_a_missing_initial_checkpoint_is_refused_unless_the_run_resumes(tmp_path, run_folder):
    flags = {"initial_load_path": "/no/such/folder"}
    assert problems(run_folder, **flags) == []
    assert problems(tmp_path / "fresh", **flags) == [
        (
            "--checkpoint.initial_load_path is '/no/such/folder'\n"
            "allowed: the folder of a checkpoint\n"
            "fix: give an existing folder"
        )
    ]


def test_remote_checkpoints_are_not_read(run_folder):
    (run_folder / "checkpoint" / "step-10" / ".metadata").write_bytes(b"")
    assert problems(run_folder, folder="gs://bucket/checkpoint") == []


def test_step_of_a_checkpoint_is_in_its_folders_name(tmp_path):
    assert step_of(tmp_path / "step-120") == 120
    with pytest.raises(ValueError, match="last is not named step-N"):
        step_of(tmp_path / "last")


ANOTHER_MODEL = """\
--checkpoint.folder is 'RUN/checkpoint/step-10'
allowed: a checkpoint of tiny debug
fix: it is of {}: choose another --dump_folder, or train that model"""


def test_a_checkpoint_of_another_model_is_refused_with_the_fields_that_differ(run_folder):
    write_identity(run_folder / "checkpoint", identity_of(spec()))
    assert problems(run_folder) == []
    assert problems(run_folder, model=spec(theta=5e5)) == [
        ANOTHER_MODEL.format("tiny debug, with theta 10000.0 (here 500000.0)")
    ]
    # Also where there would be nothing to do.
    assert problems(run_folder, model=spec(width=9), num_steps=10) == [
        ANOTHER_MODEL.format("tiny debug, with width 8 (here 9)")
    ]


def test_without_a_record_of_the_model_its_tensors_are_compared(run_folder):
    assert problems(run_folder) == []
    assert problems(run_folder, model=spec(width=9)) == [
        ANOTHER_MODEL.format("another model, with weight (8, 8) (here (9, 9))")
    ]


def test_a_damaged_record_of_the_model_is_refused(run_folder):
    (run_folder / "checkpoint" / "model.json").write_text("{}")
    (problem,) = problems(run_folder)
    assert (
        "fix: model.json cannot be read (KeyError): delete that file, and the model is told"
        in problem
    )


def test_weights_alone_cannot_be_resumed_from_but_may_be_the_end(run_folder, saved_weights):
    newest = run_folder / "checkpoint" / "step-10"
    shutil.rmtree(newest)
    shutil.copytree(saved_weights, newest)
    assert problems(run_folder, num_steps=10) == []
    assert problems(run_folder, load_step=5) == []
    assert problems(run_folder, exclude_from_loading=["optimizer", "train_state"]) == []
    assert problems(run_folder) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint/step-10'\n"
            "allowed: a checkpoint with the optimizer's state, to resume from\n"
            "fix: it has weights alone, by --checkpoint.last_save_model_only: to start from them, choose "
            "another --dump_folder and give --checkpoint.initial_load_path RUN/checkpoint/step-10; to "
            "resume from an older step, give --checkpoint.load_step"
        )
    ]


def test_a_save_in_hugging_faces_form_cannot_be_resumed_from(run_folder):
    newest = run_folder / "checkpoint" / "step-15"
    newest.mkdir()
    (newest / "model.safetensors.index.json").touch()
    assert problems(run_folder, num_steps=15) == []
    assert problems(run_folder) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint/step-15'\n"
            "allowed: a checkpoint with the optimizer's state, to resume from\n"
            "fix: it has weights alone, by --checkpoint.last_save_in_hf: to start from them, choose "
            "another --dump_folder and give --checkpoint.initial_load_path RUN/checkpoint/step-15 "
            "--checkpoint.initial_load_in_hf; to resume from an older step, give --checkpoint.load_step"
        )
    ]


def test_a_run_starts_from_weights_that_fit_its_model(tmp_path, saved_weights):
    flags = {"initial_load_path": str(saved_weights)}
    assert problems(tmp_path, **flags) == []
    (problem,) = problems(tmp_path, model=spec(width=9), **flags)
    assert problem.replace(str(saved_weights), "WEIGHTS") == (
        "--checkpoint.initial_load_path is 'WEIGHTS'\n"
        "allowed: an intact checkpoint of tiny debug\n"
        "fix: it has weight (8, 8) (here (9, 9)); give a checkpoint of this model, or "
        "--checkpoint.initial_load_in_hf for one in Hugging Face's form"
    )
    (problem,) = problems(tmp_path, initial_load_path=str(saved_weights.parent))
    assert "no .metadata in it; give a folder step-N of a full checkpoint, or" in problem


def test_another_number_of_readers_cannot_read_on(run_folder):
    assert problems(run_folder, num_readers=2, num_steps=10) == []
    assert problems(run_folder, num_readers=2, exclude_from_loading=["dataloader"]) == []
    assert problems(run_folder, num_readers=2) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint/step-10'\n"
            "allowed: a checkpoint of 2 data-parallel rank(s), to read on from there\n"
            "fix: 1 read when it was saved: use as many, or begin the text anew with "
            "--checkpoint.exclude_from_loading dataloader"
        )
    ]


@pytest.mark.parametrize(
    "name", ["step-04", "step-\u0664", "step-4\n", "Step-4", "step--4", "step-+4", f"step-{9**40}"]
)
def test_a_folder_that_people_read_as_a_step_is_refused(run_folder, name):
    steps = run_folder / "checkpoint"
    (steps / "step-5").rename(steps / name)
    (steps / "step-5-backup").mkdir()
    assert problems(run_folder) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint'\n"
            "allowed: folders step-N of checkpoints, with N in ASCII digits and no zeros in front\n"
            f"fix: rename or move away {name!r}"
        )
    ]


@pytest.mark.parametrize("made_by", ["rename", "copy"])
def test_a_checkpoint_of_another_step_is_refused(run_folder, made_by):
    steps = run_folder / "checkpoint"
    Checksums.of_save(steps / "step-10", {}).write(steps / "step-10")
    if made_by == "copy":
        shutil.copytree(steps / "step-10", steps / "step-12")
    else:
        (steps / "step-10").rename(steps / "step-12")
    assert problems(run_folder) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint/step-12'\n"
            "allowed: an intact checkpoint\n"
            "fix: it was saved at step 10, and its folder is named step-12; rename it to step-10, "
            "or else: delete this folder to resume from an older one, or choose another "
            "--dump_folder"
        )
    ]


def test_a_pipe_in_place_of_the_checksums_is_refused_at_once(run_folder):
    os.mkfifo(run_folder / "checkpoint" / "step-10" / "checksums.json")
    (problem,) = problems(run_folder)
    assert "fix: checksums.json cannot be read (OSError): delete this folder" in problem


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "checkpoint").touch()
    assert problems(tmp_path) == [
        (
            "--checkpoint.folder is 'RUN/checkpoint'\n"
            "allowed: a folder, or a path where nothing is yet\n"
            "fix: move the file away, or choose another --checkpoint.folder"
        )
    ]
