"""Names that are imported when they are used, and functions that are not compiled meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from gt_trainer.late_imports import compiling_nothing, imported_when_used, left_out
from gt_trainer.models.llama3 import llama3_debugmodel

PACKAGE = """
class Box:
    def __init__(self, content):
        self.content = content

    @classmethod
    def empty(cls):
        return cls(None)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of two modules, and a user of both."""
    folder = tmp_path / "boxes_to_import"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "sizes.py").write_text("def doubled(size):\n    return 2 * size\n")
    (tmp_path / "user_of_boxes.py").write_text(
        "from boxes_to_import import Box\nfrom boxes_to_import.sizes import doubled\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in list(sys.modules):
        if name.partition(".")[0] in ("boxes_to_import", "user_of_boxes"):
            del sys.modules[name]


def test_a_package_is_imported_by_the_first_use_of_a_name(package: Path):
    with imported_when_used("boxes_to_import"):
        import user_of_boxes
    assert not [name for name in sys.modules if name.startswith("boxes_to_import")]
    assert repr(user_of_boxes.Box) == "<boxes_to_import.Box, imported when it is used>"

    assert user_of_boxes.doubled(3) == 6
    made = user_of_boxes.Box.empty()
    import boxes_to_import

    assert isinstance(made, boxes_to_import.Box)
    assert isinstance(boxes_to_import.Box(1), user_of_boxes.Box)
    assert not isinstance(1, user_of_boxes.Box)


def test_a_package_that_was_imported_stays_as_it_is(package: Path):
    import boxes_to_import

    with imported_when_used("boxes_to_import"):
        import user_of_boxes
    assert user_of_boxes.Box is boxes_to_import.Box


def test_a_name_that_there_is_not_is_missed_when_it_is_used(package: Path):
    with imported_when_used("boxes_to_import"):
        from boxes_to_import import Crate
    with pytest.raises(AttributeError, match="has no attribute 'Crate'"):
        Crate()


def test_functions_are_compiled_again_afterwards(monkeypatch: pytest.MonkeyPatch):
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    with compiling_nothing():
        assert torch.compile(doubled, backend="eager") is doubled
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"
    assert torch.compile(doubled, backend="eager") is not doubled


def test_what_a_run_will_use_is_known_before_ranks_are_forked():
    config = llama3_debugmodel()
    assert left_out(config) == []
    config.compile = replace(config.compile, inductor_compilation="regional")
    assert left_out(config) == ["torch._inductor.compile_fx"]
    config.validator.dataloader = HuggingFaceTextDataLoader.Config()
    config.validator.enable = False
    assert left_out(config) == ["torch._inductor.compile_fx"]
    config.validator.enable = True
    assert left_out(config) == ["torch._inductor.compile_fx", "datasets"]
    config.compile = replace(config.compile, inductor_compilation="none", mode="aot_joint")
    assert left_out(config) == ["networkx", "datasets"]
    config.compile = replace(config.compile, joint_partitioner="save_all")
    assert left_out(config) == ["datasets"]


START = """
import json, sys
from pathlib import Path
from gt_trainer.command_line.load_configuration import load_configuration
from gt_trainer.command_line.command_line import parse_command_line

load_configuration(parse_command_line(["--config", "llama3_debugmodel"]))
unused = ("pandas", "pyarrow", "networkx", "torch._inductor.compile_fx", "gt_autoparallel")
assert not [name for name in unused if name in sys.modules], sorted(sys.modules)

from torchtitan.hf_datasets import text_datasets

rows = Path(sys.argv[1], "rows.jsonl")
rows.write_text(json.dumps({"text": "a"}))
found = text_datasets.load_dataset("json", data_files=str(rows), cache_dir=sys.argv[1])["train"]
assert isinstance(found, text_datasets.Dataset) and found[0] == {"text": "a"}
assert "pandas" in sys.modules
"""


def test_a_start_on_a_cpu_imports_no_compiler_and_torchtitans_data_sets_when_asked(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)],
        env={**os.environ, "GT_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
