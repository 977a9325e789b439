"""The programs in examples/ run as their first lines say, and need the packages that they name.

Those that need several processes run in ranks whose imports are shared; marked slow, as ``torchrun``
starts them, and pipelines with PyTorch's runtime too. ``plain_pytorch.py`` and those that need one
process are always programs.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_cases import EXAMPLES, losses_of_placed_example, printed_by

import gt_trainer
from gt_trace.testing import GlooWorkers
from gt_trainer.report.dump_folder import read_run
from gt_trainer.report.page import report_page

OURS = {"gt_config", "gt_trace", "gt_passes", "gt_autoparallel", "gt_pipeline"}
ALLOWED = {"torch", "transformers", *OURS, *sys.stdlib_module_names}
OF_TORCHTITAN = "torchtitan_trainer.py"
OF_THE_PLANNER = "planned_module.py"
LLAMA = "hugging_face_llama.py"


def run_example(
    name: str, *options: str, num_processes: int = 4, search_path: Path | None = None
) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    program = [*(launch if num_processes > 1 else []), str(EXAMPLES / name), *options]
    return run_python(program, search_path=search_path)


def run_python(arguments: list[str], *, search_path: Path | None = None) -> str:
    paths = [str(search_path)] if search_path else []
    inherited = os.environ.get("PYTHONPATH")  # a checkout whose packages are not installed
    finished = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        },
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def started(name: str, num_processes: int, workers: GlooWorkers | None) -> str:
    """What a program prints in all ranks of workers, or, without them, as ``torchrun`` starts it."""
    if workers is None:
        return run_example(name, num_processes=num_processes)
    assert workers.num_ranks == num_processes
    return "".join(workers.run(printed_by, name))


AS_A_PROGRAM = pytest.param(True, id="as a program", marks=pytest.mark.slow)
AS_EITHER = pytest.mark.parametrize("alone", [pytest.param(False, id="in workers"), AS_A_PROGRAM])


def the_only(pattern: str, printed: str) -> str:
    (found,) = re.findall(pattern, printed)
    return found


# With both runtimes in one run; by default the graphs alone.
RUNTIMES = [("graph",), pytest.param(("eager", "graph"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("runtimes", RUNTIMES)
def test_plain_pytorch_trains_to_the_bits_of_one_process(runtimes: tuple[str, ...], tmp_path: Path):
    # What its first lines install brings torch, and torch no NumPy.
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('NumPy')\n")
    options = ("--runtimes", *runtimes, "--schedule", "DualPipeV")
    printed = run_example("plain_pytorch.py", *options, search_path=tmp_path)
    for runtime in runtimes:
        losses = re.findall(rf"{runtime}: step \d+: loss (\S+)", printed)
        assert len(losses) == 10
        assert float(losses[-1]) < float(losses[0]) / 2
        claim = "every loss is that of training without a pipeline, to the bit"
        assert re.findall(rf"{runtime}: {claim}: (\w+)", printed) == ["True"]


def check_llama(printed: str, runtimes: tuple[str, ...]) -> None:
    for runtime in runtimes:
        assert len(re.findall(rf"{runtime}: step \d+: loss", printed)) == 2
        claim = "gradients are those of training without a pipeline, to the bit"
        # Nine in each of six layers; embedding, norm and head.
        assert re.findall(rf"{runtime}: (\d+) {claim}: (\w+)", printed) == [("57", "True")]


def test_a_hugging_face_llama_has_the_gradients_of_one_process(four: GlooWorkers):
    options = ("--runtimes", "graph", "--steps", "2")
    check_llama("".join(four.run(printed_by, LLAMA, *options)), ("graph",))


@pytest.mark.slow
def test_a_hugging_face_llama_does_so_with_both_runtimes_as_a_program():
    check_llama(
        run_example(LLAMA, "--runtimes", "eager", "graph", "--steps", "2"), ("eager", "graph")
    )


@pytest.mark.slow
def test_a_placed_hugging_face_model_has_the_losses_of_one_process():
    printed = run_example("placed_hugging_face.py")
    assert len(re.findall(r"step \d: loss", printed)) == 5
    (error,) = re.findall(r"largest relative difference from one process: (\S+)", printed)
    assert float(error) < 1e-5


def test_the_loop_of_the_placed_model_has_the_losses_of_one_process_on_two_ranks(two: GlooWorkers):
    for placed, alone in two.run(losses_of_placed_example):
        assert len(placed) == 5
        assert placed == pytest.approx(alone, rel=1e-5)


@pytest.mark.ranks
@AS_EITHER
def test_a_captured_fsdp_loop_has_every_bit_of_the_eager_one(
    alone: bool, request: pytest.FixtureRequest
):
    printed = started("fsdp_loop.py", 2, None if alone else request.getfixturevalue("two"))
    assert the_only(r"every loss is that of the eager loop, to the bit: (\w+)", printed) == "True"
    assert re.search(r"bucket-all-gathers .* buckets 4", printed)
    first, last = re.findall(r"loss (\S+) at first, (\S+) after", printed)[0]
    assert float(last) < float(first) / 10


def test_a_memory_policy_of_ones_own_takes_less_memory_and_keeps_every_bit():
    printed = run_example("memory_policy.py", num_processes=1)
    found = re.findall(r"(.+): estimated peak (\S+) MiB, gradients to the bit: True", printed)
    peaks = {title: float(peak) for title, peak in found}
    assert peaks["recompute all"] < peaks["of our own"] < peaks["save all"]


def test_an_unmodified_llama_is_planned_on_ranks_that_are_not_there():
    printed = run_example(OF_THE_PLANNER, num_processes=1)
    assert "17 simulated, of which 0 do not fit; 0 without room" in printed
    assert " dp_shard 32 x tp 2 | 4 x 2 seq save_all\n" in printed
    assert " dp_shard 32 x pp 2 | 8 x 1 seq 1F1B selective\n" in printed
    assert "left out" not in printed
    rows = re.findall(r"(\S+)GiB .* {2}(.*) \| 4 x 1 seq (\w+)$", printed, re.MULTILINE)
    held = {(sharding, policy): float(gib) for gib, sharding, policy in rows}
    policies = ("full_recompute", "selective_alternate", "selective", "save_all")
    in_order = [held["dp_shard 64", policy] for policy in policies]
    assert in_order == sorted(in_order)
    assert held["dp_shard 64", "selective"] < held["dp_replicate 64", "selective"]
    assert the_only(r"fastest: shard\(model, mesh, mode='(\w+)'\)", printed) == "shard"
    assert "bucket-all-gathers" in the_only(r"passes: (.*)", printed)


@pytest.mark.ranks
@AS_EITHER
def test_experts_of_ones_own_exchange_tokens_behind_computation(
    alone: bool, request: pytest.FixtureRequest
):
    printed = started("overlapped_experts.py", 2, None if alone else request.getfixturevalue("two"))
    assert re.search(r"schedule-ep-overlap .* windows_interleaved 4", printed)
    assert float(the_only(r"largest relative difference by the overlap: (\S+)", printed)) < 1e-5
    first, last = re.findall(r"loss (\S+) at first, (\S+) after", printed)[0]
    assert float(last) < float(first)


@pytest.mark.ranks
@AS_EITHER
def test_an_unmodified_llama_runs_in_stages_of_tensor_parallel_ranks(
    alone: bool, request: pytest.FixtureRequest
):
    printed = started(
        "tensor_parallel_pipeline.py", 4, None if alone else request.getfixturevalue("four")
    )
    losses = re.findall(r"step \d: loss (\S+)", printed)
    assert len(losses) == 5
    assert float(losses[-1]) < float(losses[0])
    assert float(the_only(r"largest relative difference from one process: (\S+)", printed)) < 1e-5


def trained_by_torchtitans_trainer(mode: str, folder: Path) -> list[float]:
    """The losses of five steps, of which the run's page and records are what they should be."""
    tokenizer = Path(gt_trainer.__path__[0], "data", "tokenizer")
    options = [
        *("--module", f"examples.{OF_TORCHTITAN.removesuffix('.py')}", "--config", "counting"),
        *("--parallelism.data_parallel_shard_degree", "2", "--compile.mode", mode),
        *("--hf_assets_path", str(tokenizer), "--dump_folder", str(folder)),
    ]
    printed = run_python(
        ["-m", "gt_trainer", "--nproc", "2", *options],
        search_path=EXAMPLES.parent,
    )
    assert ("Captured the training step" in printed) == (mode != "none")
    assert float(the_only(r"The parameters are (\S+) from their average", printed)) > 0.1
    run = read_run(folder)
    (start,) = run.starts
    assert (start["step"], start["last_step"], start["num_ranks"]) == (1, 5, 2)
    assert start["model"] == "llama3 debugmodel"
    assert start["compile"] == ({} if mode == "aot_fx_trace" else {"mode": mode})
    page = report_page(run)
    assert ("bucket-all-gathers" in page) == (mode != "none")
    assert "rank_1.log" in page
    return [each["loss"] for each in run.steps]


def test_a_trainer_of_torchtitan_trains_with_captured_steps(tmp_path: Path):
    losses = trained_by_torchtitans_trainer("aot_fx_trace", tmp_path)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow  # two runs of two processes
def test_captured_steps_of_a_trainer_of_torchtitan_have_the_bits_of_eager_ones(tmp_path: Path):
    captured = trained_by_torchtitans_trainer("aot_fx_trace", tmp_path / "captured")
    assert captured == trained_by_torchtitans_trainer("none", tmp_path / "eager")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_they_import_torch_transformers_and_packages_of_ours_alone(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    further = {OF_TORCHTITAN: {"torchtitan", "gt_trainer"}, OF_THE_PLANNER: {"gt_trainer"}}
    allowed = ALLOWED | further.get(path.name, set())
    assert imported <= allowed
    assert not {"gt_autoparallel", "gt_pipeline"} <= imported


def test_every_example_is_shown_in_a_tutorial():
    """That a piece is what its program has, tools/source_rules.py compares."""
    pages = (EXAMPLES.parent / "docs" / "tutorials").glob("*.md")
    texts = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    shown = set(re.findall(r"^<!-- examples/(\w+\.py): \w+ -->$", texts, re.MULTILINE))
    assert shown == {path.name for path in EXAMPLES.glob("*.py")} - {"plain_pytorch.py", LLAMA}


def test_every_example_is_in_the_readme_of_the_folder():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py") if f"({path.name})" not in readme} == set()
