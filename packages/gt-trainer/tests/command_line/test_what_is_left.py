"""What a run that a signal ended says of its checkpoints, and where one ended by itself."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager

from gt_trainer.command_line.what_is_left import left_by_ended, results_of

NOTHING = "  nothing was saved: --checkpoint.enable keeps what a run has reached"


def ended(folder, **flags):
    config = SimpleNamespace(
        dump_folder=str(folder), checkpoint=CheckpointManager.Config(**{"enable": True, **flags})
    )
    return left_by_ended(config)


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of step 4, and a save of step 5 that was cut off."""
    steps = tmp_path / "checkpoint"
    states = {"weight": torch.ones(3), "optimizer": {"lr": 1.0}, "train_state": {"step": 4}}
    dcp.save(states, checkpoint_id=steps / "step-4", no_dist=True)
    (steps / "step-5").mkdir()
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestLeftByEnded:
    def test_the_newest_complete_checkpoint_is_named(self, saved):
        assert ended(saved) == (
            f"  the newest checkpoint is {saved / 'checkpoint' / 'step-4'}: "
            "the same command goes on from it"
        )

    def test_a_command_that_names_its_step_does_not_go_on_from_the_newest(self, saved):
        assert ended(saved, load_step=2) == (
            f"  the newest checkpoint is {saved / 'checkpoint' / 'step-4'}"
        )

    def test_weights_alone_are_not_gone_on_from(self, saved):
        last = saved / "checkpoint" / "step-6"
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=last, no_dist=True)
        assert ended(saved) == f"  the newest checkpoint is {last}"

    def test_a_save_that_was_cut_off_is_none(self, tmp_path):
        (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
        assert ended(tmp_path) == (
            f"  nothing is left to go on from: no checkpoint is complete in "
            f"{tmp_path / 'checkpoint'}"
        )

    @pytest.mark.parametrize("flags", [{"enable": False}, {"load_only": True}])
    def test_a_run_that_saves_nothing_says_so(self, saved, flags):
        assert ended(saved, **flags) == NOTHING

    def test_a_remote_folder_is_not_read(self):
        assert ended("s3://bucket/run") == "  what was saved is in s3://bucket/run/checkpoint"


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (12, "gt-train: ended at step 12 of 20, where the data did"),
        (20, "gt-train: finished 20 steps"),
    ],
)
def test_a_run_whose_data_ended_does_not_say_that_it_trained_all_its_steps(tmp_path, last, said):
    lines = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, last + 1))
    (tmp_path / "metrics.jsonl").write_text(lines)
    config = SimpleNamespace(
        dump_folder=str(tmp_path),
        training=SimpleNamespace(steps=20),
        checkpoint=CheckpointManager.Config(),
    )
    assert results_of(config).splitlines()[0] == said
