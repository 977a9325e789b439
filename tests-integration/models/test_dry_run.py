"""Every shipped configuration builds, places and captures on as many ranks as it is meant for.

One process, no weights: torch's fake process group and the meta device. The large ones take a
minute or more each: ``pytest -m slow tests-integration/models/test_dry_run.py``. Building and placing all
of them without a capture is quick: ``test_models_configurations.py``.
"""

from __future__ import annotations

import importlib
from functools import cache

import pytest

from gt_trace.testing import fake_world
from gt_trainer.dry_run.dry_run import DryRunReport, dry_run
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.models.catalog import CATALOG, INTENDED_WORLD_SIZE
from gt_trainer.preflight.preflight import check_configuration

_QUICK = {"deepseek_v3_debugmodel", "qwen3_moe_debugmodel"}
_ENTRIES = [
    pytest.param(entry, marks=[] if entry.config in _QUICK else [pytest.mark.slow], id=entry.config)
    for table in CATALOG.values()
    for entry in table.values()
]


def run(module: str, name: str, world_size: int, **parallelism: int) -> DryRunReport:
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    for field, value in parallelism.items():
        setattr(config.parallelism, field, value)
    check_configuration(config, world_size, will_train=False)
    return dry_run(config, world_size)


@cache
def run_as_intended(module: str, name: str) -> DryRunReport:
    return run(module, name, INTENDED_WORLD_SIZE[name])


def test_fake_step_needs_a_process_of_its_own() -> None:
    config = importlib.import_module("gt_trainer.models.llama3").llama3_debugmodel()
    message = "a fake step needs a process without a process group, and this one has one"
    with (
        fake_world(rank=0, world_size=2),
        pytest.raises(RuntimeError, match=f"^{message}$"),
        fake_step(config, 2),
    ):
        raise AssertionError("not refused")


@pytest.mark.parametrize("entry", _ENTRIES)
def test_configuration_is_captured_at_its_intended_world_size(entry) -> None:
    world_size = INTENDED_WORLD_SIZE[entry.config]
    report = run_as_intended(entry.module, entry.config)
    collectives = dict(report.collectives)
    assert 0 < report.num_nodes < report.num_nodes_captured
    # Sharding is even up to padding, and expert parallelism counts among the shards.
    assert report.num_parameters_per_rank < 1.05 * report.num_parameters / world_size + 10_000
    assert (collectives.get("all_gather_into_tensor", 0) > 0) == (world_size > 1)
    degrees = dict(report.degrees)
    assert ("all_to_all_single" in collectives) == (degrees.get("ep", 1) > 1)


def test_report_says_what_a_rank_would_hold_and_execute() -> None:
    report = run("llama3", "llama3_debugmodel", 4, tensor_parallel_degree=2)
    lines = str(report).splitlines()
    assert lines[0] == "Dry run of llama3 debugmodel on 4 ranks (dp_shard 2 x tp 2)"
    assert lines[1:3] == [
        "  parameters       6,163,712",
        "  on each rank     1,541,760 (0.01 GiB as stored)",
    ]
    assert lines[4].startswith("  collectives      ")
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= dict(report.collectives).keys()


def test_report_simulates_the_step_and_says_that_it_does() -> None:
    report = run("deepseek_v3", "deepseek_v3_debugmodel", 8, expert_parallel_degree=4)
    simulated = report.simulated
    purposes = {total.purpose for total in simulated.graph.by_purpose}
    assert {"FSDP unshard", "FSDP reduce_grad", "EP token exchange"} <= purposes
    assert not simulated.graph.assumed_symbols
    assert simulated.graph.memory.num_unsized == 0
    exchanged = [r for r in simulated.graph.collectives if r.purpose == "EP token exchange"]
    # With balanced routing a rank receives as many tokens as it sends, forward and backward.
    assert len({record.num_bytes for record in exchanged}) == 1
    assert simulated.facts.num_microbatches == 1
    lines = str(report).splitlines()
    (heading,) = [line for line in lines if not line.startswith("  ")][1:]
    assert heading.startswith("Simulated on 8 H100 SXM, by a model of the hardware")
    assert any(line.startswith("  attention        captured as scaled dot") for line in lines)


def test_accumulation_counts_the_graph_once_for_each_microbatch() -> None:
    config = importlib.import_module("gt_trainer.models.llama3").llama3_debugmodel()
    config.training.global_batch_size = 3 * config.training.local_batch_size
    simulated = dry_run(config, 1).simulated
    assert simulated.facts.num_microbatches == 3
    assert simulated.facts.tokens == 3 * config.training.local_batch_size * config.training.seq_len


@pytest.mark.parametrize(
    ("module", "name", "published"),
    [
        # pytorch/torchtitan #3434: FSDP 32 x EP 32, no overlap of the token exchange.
        pytest.param("deepseek_v3", "deepseek_v3_16b", 8086, marks=pytest.mark.slow),
        # pytorch/torchtitan #3141: FSDP 4 x TP 2, regional Inductor.
        pytest.param("llama3", "llama3_8b", 6876, marks=pytest.mark.slow),
    ],
)
def test_simulated_throughput_is_within_15_percent_of_the_published(
    module: str, name: str, published: float
) -> None:
    """The constants are fixed: where this fails, the graph or the model of it has changed.

    docs/decisions/0007-cost-model.md tells how far off each is.
    """
    simulated = run_as_intended(module, name).simulated.tokens_per_second_per_gpu
    assert 0.85 < simulated / published < 1.15
