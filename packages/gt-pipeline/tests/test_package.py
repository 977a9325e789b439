"""The public surface of the package, and what importing it loads."""

from __future__ import annotations

import importlib
import importlib.metadata
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import gt_pipeline
from gt_pipeline import errors

_OTHERS = ("gt_trace", "gt_passes", "gt_autoparallel", "gt_trainer", "torchtitan")

_SLOW = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.tensor", "sympy")

_LOADED = """
import importlib, sys
for module in ("gt_pipeline.split", "gt_pipeline.schedules", "gt_pipeline.runner"):
    importlib.import_module(module)
    print(module, *sorted({"gt_pipeline", *sys.argv[1:]}.intersection(sys.modules)))
"""

_WITHOUT_NUMPY = """
import datetime, os, sys, tempfile
sys.modules["numpy"] = None
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from toy_pipeline import batch, eager_stages
from gt_pipeline.runner import GraphPPRunner
from gt_pipeline.schedules import schedule_of
from gt_pipeline.split import check_splittable, stage_modules

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

names = [("layers.0",), ("layers.1",)]
check_splittable(Model(), names, (torch.ones(1, 2),))
print(*stage_modules(Model(), names, [1])[1].state_dict())
sys.stdout.flush()

torch.set_num_threads(1)
store = tempfile.mktemp()
rank = 0 if os.fork() else 1
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=100),
)
planned = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=8)
tokens, target = batch()
with GraphPPRunner(eager_stages(planned, rank), planned) as runner:
    losses = runner.step(tokens, target=target).losses
if rank:
    print(len(losses), "losses", flush=True)
    os._exit(0)
os.wait()
os.remove(store)
"""


def test_importing_the_parts_without_capture_loads_nothing_that_is_slow_and_no_other_package_of_ours():
    command = [sys.executable, "-c", _LOADED, *_OTHERS, *_SLOW]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # gt_pipeline itself shows that the list would not hide another one.
    assert loaded.splitlines() == [
        "gt_pipeline.split gt_pipeline",
        "gt_pipeline.schedules gt_pipeline",
        "gt_pipeline.runner gt_pipeline",
    ]


def test_splitting_and_running_need_no_numpy():
    command = [sys.executable, "-c", _WITHOUT_NUMPY, str(Path(__file__).parent / "runner")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["layers.1.weight layers.1.bias", "8 losses"]


@pytest.mark.parametrize("part", ["estimates", "graph", "runner", "schedules", "split"])
def test_every_exported_name_is_there_documented_and_in_the_readme(part: str):
    if part in ("estimates", "graph"):
        pytest.importorskip("gt_passes")
    module = importlib.import_module(f"gt_pipeline.{part}")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        exported = getattr(module, name)
        assert exported.__doc__ or not isinstance(exported, type | FunctionType), name
        assert re.search(rf"\b{name}\b", readme), f"{name} is exported, and not in the README"


def test_every_error_stands_in_the_tree():
    tree = errors.__doc__ or ""
    public = {name: found for name, found in vars(errors).items() if name.endswith("Error")}
    for name, error in public.items():
        if name.startswith("_"):
            continue
        assert issubclass(error, errors.GtPipelineError)
        assert name in tree
        for base in (ValueError, TypeError, RuntimeError):
            if issubclass(error, base):
                assert re.search(rf"{name} +\({base.__name__}\)", tree)


def test_an_error_that_crosses_processes_keeps_its_text():
    error = errors.StageLayoutError(what="3 stages over 2 ranks", problems=["one", "two"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.StageLayoutError
    assert str(copy) == str(error) == "3 stages over 2 ranks:\n  - one\n  - two"


def test_the_installed_metadata_ask_for_torch_and_gt_config_without_the_extra():
    requirements = importlib.metadata.requires("gt-pipeline") or []
    names = {re.split("[<>=;]", line)[0].strip(): "extra ==" in line for line in requirements}
    assert names == {"torch": False, "gt-config": False, "gt-trace": True, "gt-passes": True}
    assert importlib.metadata.version("gt-pipeline") == gt_pipeline.__version__
