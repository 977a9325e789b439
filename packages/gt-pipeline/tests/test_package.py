"""The public surface of the package, and what importing it loads."""

from __future__ import annotations

import importlib.metadata
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gt_pipeline
from gt_pipeline import errors, schedules, split

_OTHERS = ("gt_config", "gt_trace", "gt_passes", "gt_autoparallel", "gt_trainer", "torchtitan")

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


def test_importing_the_torch_only_parts_loads_nothing_that_is_slow_and_no_other_package_of_ours():
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


def test_the_public_names_are_every_error_and_exactly_these():
    assert [name for name in gt_pipeline.__all__ if name not in errors.__all__] == [
        "LayerNaming",
        "RemovalPolicy",
        "Schedule",
        "SharedGroup",
        "__version__",
        "build_pipeline_schedule",
        "check_cover",
        "check_splittable",
        "draw",
        "module_names_by_cost",
        "module_names_per_stage",
        "peak_live",
        "pipeline_metadata",
        "schedule_of",
        "simulate",
        "split_module",
        "stage_indices_of_rank",
        "stage_modules",
    ]
    assert set(errors.__all__) <= set(gt_pipeline.__all__)
    assert all(hasattr(gt_pipeline, name) for name in gt_pipeline.__all__)


@pytest.mark.parametrize("part", [schedules, split], ids=["schedules", "split"])
def test_every_name_that_a_part_exports_is_there(part: ModuleType):
    assert len(part.__all__) == len(set(part.__all__))
    assert all(hasattr(part, name) for name in part.__all__)


def test_every_error_stands_in_the_tree():
    tree = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
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


def test_the_installed_metadata_ask_for_torch_alone_without_the_extra():
    requirements = importlib.metadata.requires("gt-pipeline") or []
    names = {re.split("[<>=;]", line)[0].strip(): "extra ==" in line for line in requirements}
    assert names == {"torch": False, "gt-config": True, "gt-trace": True, "gt-passes": True}
    assert importlib.metadata.version("gt-pipeline") == gt_pipeline.__version__
