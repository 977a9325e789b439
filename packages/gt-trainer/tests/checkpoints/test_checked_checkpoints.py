"""Checkpoints are saved with checksums, and what is loaded is what was saved."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.tools.logging import logger

from gt_trainer.checkpoints.checksums import (
    CHECKSUMS,
    Checksums,
    ChecksumsUnreadableError,
    read_checksums,
    sha256_of,
)
from gt_trainer.checkpoints.damages import (
    DamagedCheckpointError,
    check_on_all_ranks,
    check_step,
    damages_of,
    set_aside_damaged,
)
from gt_trainer.checkpoints.manager import CheckedWriter, _finish_hugging_face
from gt_trainer.checkpoints.plain_reader import NotPlainDataError, PlainLoadPlanner, PlainReader
from gt_trainer.models.llama3 import llama3_debugmodel


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def states() -> dict:
    return {
        "weight": torch.arange(64.0).reshape(8, 8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "train_state": {"step": 5, "name": "run"},
        "dataloader": {"dp_rank_0": pickle.dumps({"token": 3}), "world_size": 1},
    }


def save(folder: Path) -> Path:
    dcp.save(states(), storage_writer=CheckedWriter(folder))
    return folder


def load(folder: Path) -> dict:
    into = states()
    for value in (into["weight"], into["half"]):
        value.zero_()
    into["train_state"] = {"step": 0, "name": ""}
    dcp.load(into, storage_reader=PlainReader(folder), planner=PlainLoadPlanner())
    return into


@pytest.fixture(scope="module")
def saved(one_rank, tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved") / "step-5")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint" / "step-5"))


def saved_at(step: int, folder: Path) -> Path:
    """The same checkpoint as saved at another step."""
    other = Path(shutil.copytree(folder, folder.with_name(f"step-{step}")))
    Checksums.of_save(other, read_checksums(folder).sha256).write(other)
    return other


def test_checksums_are_those_of_all_files_and_the_reader_gets_what_was_saved(folder):
    checksums = read_checksums(folder)
    names = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    assert checksums.sha256 == {name: sha256_of(folder / name) for name in names}
    assert damages_of(folder) == []
    loaded = load(folder)
    assert torch.equal(loaded["weight"], states()["weight"])
    assert torch.equal(loaded["half"], states()["half"])
    assert loaded["train_state"] == {"step": 5, "name": "run"}
    assert loaded["dataloader"] == states()["dataloader"]


def test_an_asynchronous_save_has_what_was_there_when_it_began(one_rank, tmp_path):
    saving = states()
    done = dcp.async_save(saving, storage_writer=CheckedWriter(tmp_path / "step-1"))
    saving["weight"].zero_()
    done.result()
    assert damages_of(tmp_path / "step-1") == []
    assert torch.equal(load(tmp_path / "step-1")["weight"], states()["weight"])


def test_a_checkpoint_with_checksums_is_one_for_pytorch_too(folder):
    into = states()
    into["weight"].zero_()
    dcp.load(into, checkpoint_id=folder)
    assert torch.equal(into["weight"], states()["weight"])


def test_1000_random_damages_are_all_found(folder, tmp_path):
    generator = random.Random(0)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = sorted(whole)
    for case in range(1000):
        name = generator.choice(names)
        content = bytearray(whole[name])
        kind = generator.choice(["bit", "zeros", "cut", "longer"])
        at = generator.randrange(len(content))
        if kind == "bit":
            content[at] ^= 1 << generator.randrange(8)
        elif kind == "zeros":
            content[at : at + 16] = bytes(b ^ 255 for b in content[at : at + 16])
        elif kind == "cut":
            del content[at:]
        else:
            content += b"x"
        (folder / name).write_bytes(content)
        same = name == CHECKSUMS and _says_the_same(bytes(content), whole[name])
        assert bool(damages_of(folder)) != same, (case, name, kind, at)
        (folder / name).write_bytes(whole[name])


def _says_the_same(content: bytes, whole: bytes) -> bool:
    """Whether damage of a text left what it says, such as another white space."""
    try:
        return json.loads(content) == json.loads(whole)
    except ValueError:
        return False


def test_files_that_are_missing_or_were_added_are_damages(folder):
    data = next(folder.glob("*.distcp"))
    shutil.copy(data, folder / "__9_0.distcp")
    data.unlink()
    assert damages_of(folder) == [
        f"{data.name} is missing",
        "__9_0.distcp was not there when it was saved",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "checksums.json cannot be read (JSONDecodeError)"),
        ("[]", "checksums.json is none that this version wrote"),
        ('{"format": "other", "sha256": {}}', "checksums.json is none that this version wrote"),
    ],
)
def test_checksums_that_cannot_be_understood_are_a_damage(folder, text, said):
    (folder / CHECKSUMS).write_text(text)
    with pytest.raises(ChecksumsUnreadableError):
        read_checksums(folder)
    assert damages_of(folder) == [said]


def test_a_damaged_checkpoint_is_refused_with_the_newest_intact_one(folder):
    for step in (1, 3, 4):
        saved_at(step, folder)
    for damaged in ("step-4", "step-5"):
        data = next(folder.with_name(damaged).glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedCheckpointError) as refused:
        check_on_all_ranks(folder, is_own=True)
    intact = folder.with_name("step-3")
    assert str(refused.value) == (
        f"the checkpoint {folder} is damaged: __0_0.distcp is not what was saved\n"
        f"  The newest intact one is {intact}: --checkpoint.load_step 3"
    )
    check_on_all_ranks(intact, is_own=True)
    with pytest.raises(DamagedCheckpointError) as refused:
        check_on_all_ranks(folder, is_own=False)
    assert str(refused.value).endswith(
        f"  The newest intact one beside it: --checkpoint.initial_load_path {intact}"
    )


def test_a_damaged_checkpoint_alone_is_refused_with_where_to_start(folder):
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError) as refused:
        check_on_all_ranks(folder, is_own=True)
    assert str(refused.value) == (
        f"the checkpoint {folder} is damaged: .metadata is not what was saved\n"
        "  No other one there is intact: start anew in another --dump_folder"
    )


def test_a_checkpoint_without_checksums_is_loaded_as_it_is_and_said(folder, caplog):
    (folder / CHECKSUMS).unlink()
    check_on_all_ranks(folder, is_own=True)
    assert f"{folder} has no checksums.json: whether it is intact is not known" in caplog.text


def test_before_a_restart_damaged_checkpoints_are_set_aside_until_one_is_intact(folder):
    saved_at(4, folder)
    (folder / ".metadata").write_bytes(b"")
    assert [*set_aside_damaged(folder.parent)] == [
        f"{folder} is damaged (.metadata is not what was saved), and is now damaged-5"
    ]
    assert {path.name for path in folder.parent.iterdir()} == {"damaged-5", "step-4"}


def test_a_save_over_an_older_one_is_incomplete_until_it_is_whole(folder):
    class FailingWriter(CheckedWriter):
        def write_data(self, plan, planner):
            raise OSError("the disk went away")

    with pytest.raises(BaseException, match="the disk went away"):
        dcp.save(states(), storage_writer=FailingWriter(folder))
    assert [*folder.iterdir()] == []
    save(folder)
    assert damages_of(folder) == []


def test_what_another_save_left_is_no_part_of_a_new_one(folder):
    """One with more ranks, or in Hugging Face's form, or that was cut off."""
    sharded = folder / "sharded"
    sharded.mkdir()
    left = [folder / "__7_0.distcp", folder / "model.safetensors", sharded / "a.safetensors"]
    for path in (*left, folder / "model.safetensors.index.json"):
        path.write_bytes(b"of another save")
    save(folder)
    assert damages_of(folder) == []
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", CHECKSUMS}


def test_a_rank_with_nothing_to_save_writes_no_file(one_rank, tmp_path):
    dcp.save({}, storage_writer=CheckedWriter(tmp_path / "step-1"))
    assert damages_of(tmp_path / "step-1") == []
    assert not [*(tmp_path / "step-1").glob("*.distcp")]


def test_a_file_that_cannot_be_read_is_a_damage(folder, monkeypatch):
    def unreadable(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gt_trainer.checkpoints.checksums.sha256_of", unreadable)
    assert damages_of(folder) == [
        ".metadata cannot be read (Input/output error)",
        "__0_0.distcp cannot be read (Input/output error)",
    ]


class _RunsACommand:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_crafted_metadata_runs_nothing(folder, tmp_path):
    ran = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(_RunsACommand(ran)))
    with pytest.raises(NotPlainDataError, match=r"it names posix\.system"):
        PlainReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    with pytest.raises(NotPlainDataError, match="it is a dict, and no metadata"):
        PlainReader(folder).read_metadata()
    assert not ran.exists()


def test_a_crafted_value_that_is_no_tensor_runs_nothing(one_rank, tmp_path):
    ran = tmp_path / "ran"
    crafted = {"train_state": {"step": _RunsACommand(ran)}}
    dcp.save(crafted, checkpoint_id=tmp_path / "step-1")
    into = {"train_state": {"step": 0}}
    with pytest.raises(BaseException, match="Weights only load failed"):
        dcp.load(into, storage_reader=PlainReader(tmp_path / "step-1"), planner=PlainLoadPlanner())
    assert not ran.exists()


_KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from gt_trainer.checkpoints.manager import CheckedWriter
from gt_trainer.checkpoints.damages import damages_of
from gt_trainer.step_folders import is_complete, step_folders

folder, generator, num_complete = Path(sys.argv[1]), random.Random(0), 0
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        for step in range(1000):
            states = {"weight": torch.full((300, 300), float(number)), "at": {"step": step}}
            writer = CheckedWriter(folder / f"step-{step % 3}")
            dcp.save(states, storage_writer=writer, no_dist=True)
    time.sleep(generator.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for path in step_folders(folder):
        if is_complete(path):
            num_complete += 1
            damages = damages_of(path)
            assert not damages, (number, path, damages)
print(num_complete)
"""


@pytest.mark.slow
def test_1000_kills_while_saving_never_leave_what_looks_whole_and_is_not(tmp_path):
    """A process saves again and again, over its older saves too, and is killed at any moment."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _KILLS, str(tmp_path), "1000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0  # how many were complete; on a slow machine few are


def test_weights_stay_and_get_checksums_where_the_assets_are_damaged(
    one_rank, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logger, "propagate", True)
    assets, folder = tmp_path / "assets", tmp_path / "step-3"
    assets.mkdir()
    folder.mkdir()
    (assets / "config.json").write_text('{"eos_token_id": ')
    (folder / "model.safetensors").write_bytes(b"weights")
    adapter = SimpleNamespace(
        hf_assets_path=str(assets), model_config=llama3_debugmodel().model_spec.model
    )
    _finish_hugging_face(folder, adapter)
    line = caplog.messages[-1]
    assert line.startswith(f"{folder} has weights without config.json: JSONDecodeError: Expecting")
    assert read_checksums(folder).sha256 == {
        "model.safetensors": sha256_of(folder / "model.safetensors")
    }


@pytest.mark.parametrize("name", ["step-9", "step-0", "step-50"])
def test_a_folder_named_after_another_step_is_a_damage(folder, name):
    renamed = folder.rename(folder.with_name(name))
    assert damages_of(renamed) == [f"it was saved at step 5, and its folder is named {name}"]
    linked = folder.with_name("step-7")
    linked.symlink_to(renamed, target_is_directory=True)
    assert damages_of(linked) == ["it was saved at step 5, and its folder is named step-7"]
    assert damages_of(renamed.rename(folder.with_name("of-my-own"))) == []


def test_a_changed_step_is_a_damage_and_checksums_without_a_step_are_read(folder):
    document = json.loads((folder / CHECKSUMS).read_text())
    (folder / CHECKSUMS).write_text(json.dumps({**document, "step": 9}))
    assert damages_of(folder) == ["checksums.json is none that this version wrote"]
    old = {"format": "gt-trainer checksums 1", "sha256": document["sha256"]}
    (folder / CHECKSUMS).write_text(json.dumps(old))
    assert damages_of(folder.rename(folder.with_name("step-6"))) == []


def test_the_step_that_is_loaded_is_that_of_the_name(folder):
    check_step(folder, 5)
    with pytest.raises(DamagedCheckpointError, match="step-5 holds step 4: name its folder step-4"):
        check_step(folder, 4)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("replace", [pipe, endless, lambda path: (path.unlink(), path.mkdir())])
def test_what_is_no_regular_file_is_a_damage_and_is_not_waited_for(folder, replace):
    data = next(folder.glob("*.distcp"))
    replace(data)
    assert damages_of(folder) == [f"{data.name} cannot be read (it is no regular file)"]
    replace(folder / CHECKSUMS)
    assert damages_of(folder) == ["checksums.json cannot be read (OSError)"]


@pytest.mark.parametrize("name", ["../step-4/__0_0.distcp", "/etc/passwd", "a/b", "..", "x.bin", 7])
def test_metadata_and_checksums_name_no_files_elsewhere(folder, name):
    with (folder / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    for item in metadata.storage_data.values():
        item.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(NotPlainDataError, match=r"it names the file .* which no save writes"):
        PlainReader(folder).read_metadata()
    if name != "x.bin":
        Checksums(sha256={str(name) if name != 7 else "": "0"}, step=5).write(folder)
        assert damages_of(folder) == ["checksums.json is none that this version wrote"]
