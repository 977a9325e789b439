"""One run at a time writes to a folder."""

import os
import re
import subprocess
import sys

import pytest

from gt_trainer.run_lock import FolderInUseError, locked, use_of

_HOLD = """
import sys
from pathlib import Path
from gt_trainer.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder until it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_with_who_uses_it(tmp_path, holder):
    said = rf"another run writes to {tmp_path}: process {holder.pid} on \S+ since \d{{4}}-[-0-9: ]+"
    assert re.fullmatch(said, use_of(tmp_path))
    with (
        pytest.raises(FolderInUseError, match=f"{said}; wait for it, or choose another"),
        locked(tmp_path),
    ):
        pass


def test_a_folder_whose_run_was_killed_is_free(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert use_of(tmp_path) is None
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in use_of(tmp_path)
    assert use_of(tmp_path) is None


def test_a_folder_that_is_not_there_is_free_and_is_made_to_be_held(tmp_path):
    folder = tmp_path / "runs" / "first"
    assert use_of(folder) is None
    with locked(folder):
        assert folder.is_dir()


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo])
def test_a_lock_that_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "run.lock")
    said = r"the lock of the run, .*run.lock, cannot be opened \(.*\); move it away, or choose anot"
    with pytest.raises(FolderInUseError, match=said), locked(tmp_path):
        pass
