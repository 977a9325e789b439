"""torchtitan's models are found by its files, and nothing of it is imported."""

from __future__ import annotations

import subprocess
import sys

from gt_trainer.models.torchtitan_modules import (
    is_own_module,
    python_module,
    torchtitan_configs,
    torchtitan_modules,
)


def test_models_beyond_the_catalog_are_found():
    assert {"gpt_oss", "qwen3_5", "muse_glimmer"} <= {*torchtitan_modules()}
    assert "llama3" not in torchtitan_modules()
    assert "gpt_oss_debugmodel" in torchtitan_configs("gpt_oss")
    assert torchtitan_configs("llama3") == torchtitan_configs("no_model") == ()


def test_a_name_stands_for_a_python_module():
    assert python_module("llama3") == "gt_trainer.models.llama3"
    assert python_module("gpt_oss") == "torchtitan.models.gpt_oss.config_registry"
    assert python_module("my.models") == "my.models"


def test_a_module_of_ones_own_may_lie_in_no_package(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").touch()
    (tmp_path / "llama3.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert python_module("my_models") == "my_models"
    names = ("my_models", "no.such", "no_such", "llama3", "gpt_oss")
    assert [name for name in names if is_own_module(name)] == ["my_models", "no.such"]


def test_looking_for_models_loads_no_torch():
    source = (
        "import sys\nfrom gt_trainer.models.torchtitan_modules import torchtitan_configs\n"
        "assert torchtitan_configs('gpt_oss')\n"
        "assert 'torch' not in sys.modules and 'torchtitan' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
