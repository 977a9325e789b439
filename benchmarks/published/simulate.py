"""Simulate one published run, as ``gt-train --dry-run --published`` does, and print numbers."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass

from gt_trainer import device

device.install("cpu")

# torchtitan copies the device when it is imported, hence not above.
from gt_passes.simulation.hardware import shipped_hardware  # noqa: E402
from gt_trainer.command_line.command_line import flags_given  # noqa: E402
from gt_trainer.command_line.overrides import apply_overrides  # noqa: E402
from gt_trainer.dry_run.dry_run import dry_run  # noqa: E402
from gt_trainer.models.adapt import with_positions  # noqa: E402
from gt_trainer.models.held_out_runs import HELD_OUT_RUNS  # noqa: E402
from gt_trainer.models.published_runs import PUBLISHED_RUNS  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402
from gt_trainer.preflight.settled_defaults import settle_defaults  # noqa: E402
from published.reserved_memory import reserved_bytes  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRow:
    """What a dry run says, and what it took."""

    tokens_per_second_per_gpu: float
    peak_gib: float
    """Estimated, of the fullest rank: what is live."""
    reserved_gib: float
    """Likewise: what PyTorch's allocator would hold (``reserved_memory``)."""
    fits: bool
    exposed_share: float
    """Of the step, what computation waits for communication."""
    cpu_seconds: float
    process_gib: float


def main(name: str) -> None:
    published = {**PUBLISHED_RUNS, **HELD_OUT_RUNS}[name]
    with device.intended_for("cuda"):
        module = importlib.import_module(f"gt_trainer.models.{published.module}")
        config = getattr(module, published.config)()
        if published.positions is not None:
            config = with_positions(config, published.positions)
        config = apply_overrides(config, published.flags)
        config, _ = settle_defaults(
            config, published.world_size, asked=flags_given(published.flags)
        )
        check_configuration(config, published.world_size, will_train=False)
        hardware = shipped_hardware(f"{published.hardware}.json")
        simulated = dry_run(config, published.world_size, hardware=hardware).simulated
    row = SimulatedRow(
        tokens_per_second_per_gpu=simulated.tokens_per_second_per_gpu,
        peak_gib=simulated.peak_bytes / 2**30,
        reserved_gib=reserved_bytes(simulated) / 2**30,
        fits=simulated.fits,
        exposed_share=simulated.all_exposed_us / simulated.step_us,
        cpu_seconds=time.process_time(),
        process_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main(sys.argv[1])
