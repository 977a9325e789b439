"""What do microbatches that gather and reduce once save, and what do they cost?

Llama 3 8B on 64 ranks that do not exist, FSDP over all of them, several microbatches a step: the
collectives of a step (number and bytes), its simulated time and its estimated peak memory, beside
the same where each microbatch gathers and reduces::

    python benchmarks/bench_accumulation.py [--json FILE] [--layers 32] [--microbatches 2 8]

Counts and simulations do not vary, so each is taken once. Nothing is recorded as a CUDA graph in
either, so that the two differ in one thing; a default of GPUs records ``every_microbatch`` alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from gt_trainer import device

device.install("cpu")

# torchtitan copies the device when it is imported, hence not above.
from report import Report, Row, Sample  # noqa: E402

from gt_config import Accumulation  # noqa: E402
from gt_passes.simulation import PurposeTotal  # noqa: E402
from gt_trainer.dry_run.dry_run import dry_run  # noqa: E402
from gt_trainer.dry_run.simulated_step import SimulatedStep  # noqa: E402
from gt_trainer.models.llama3 import llama3_8b  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402
from gt_trainer.trainer import GraphTrainer  # noqa: E402

_WORLD_SIZE = 64
_EACH = "every_microbatch"
_PURPOSES = {"gatherings": "FSDP unshard", "reductions": "FSDP reduce_grad"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 8])
    options = parser.parse_args(arguments)
    report = Report(benchmark="accumulation")
    report.notes.append(
        "ours: reduce_once; peer: every_microbatch, of the same code. Collectives and bytes are "
        "those of the graphs; times and memory are simulated"
    )
    for num_microbatches in options.microbatches:
        once = _simulated("reduce_once", num_microbatches, options.layers)
        each = _simulated(_EACH, num_microbatches, options.layers)
        report.rows += _rows(
            f"llama3 8B, {options.layers} layers, {_WORLD_SIZE} ranks, "
            f"{num_microbatches} microbatches",
            once,
            each,
        )
        report.notes.append(
            f"{num_microbatches} microbatches: once {once.sensitivity}; each {each.sensitivity}"
        )
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _rows(workload: str, once: SimulatedStep, each: SimulatedStep) -> Iterator[Row]:
    def row(metric: str, unit: str, ours: float, peer: float, *, simulated: bool = False) -> Row:
        return Row(
            workload=workload,
            metric=metric,
            unit=unit,
            ours=Sample.of([ours]),
            peer=Sample.of([peer]),
            peer_name=_EACH,
            simulated=simulated,
        )

    for name, purpose in _PURPOSES.items():
        ours, peer = _total(once, purpose), _total(each, purpose)
        yield row(f"collectives, {name}", "", ours.count, peer.count)
        yield row(f"collective bytes, {name}", "GiB", _gib(ours.num_bytes), _gib(peer.num_bytes))
        ours_ms, peer_ms = ours.exposed_us / 1000, peer.exposed_us / 1000
        yield row(f"exposed, {name}", "ms", ours_ms, peer_ms, simulated=True)
    yield row("step", "ms", once.step_us / 1000, each.step_us / 1000, simulated=True)
    yield row("peak", "GiB", _gib(once.peak_bytes), _gib(each.peak_bytes), simulated=True)


def _simulated(accumulation: Accumulation, num_microbatches: int, layers: int) -> SimulatedStep:
    config: GraphTrainer.Config = llama3_8b()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    config.parallelism.data_parallel_shard_degree = _WORLD_SIZE
    config.parallelism.tensor_parallel_degree = 1
    config.training.local_batch_size = 1
    config.training.global_batch_size = _WORLD_SIZE * num_microbatches
    config.compile = dataclasses.replace(
        config.compile, accumulation=accumulation, memory_policy="selective", verify_passes=False
    )
    check_configuration(config, _WORLD_SIZE, will_train=False)
    return dry_run(config, _WORLD_SIZE).simulated


def _total(run: SimulatedStep, purpose: str) -> PurposeTotal:
    (found,) = (total for total in run.by_purpose if total.purpose == purpose)
    return found


def _gib(num_bytes: int) -> float:
    return num_bytes / 2**30


if __name__ == "__main__":
    sys.exit(main())
