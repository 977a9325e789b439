"""Does a captured step train a Hugging Face model as eager does, how fast, and in how much memory?

A decoder of transformers' Qwen3 with 1.1 billion parameters is trained on real text (the sources of
Python's library and of torch) by AdamW in a plain loop, in bfloat16 by autocast. Each contestant is
a process of its own, from the same seed: eager, ``torch.compile``, ours compiled in regions and as
a whole, with CUDA graphs. Eager is run once more with the batches in another order, which shows how
much losses may differ::

    python benchmarks/bench_training_run.py --json FILE [--steps 300] [--only "ours, full"]

What was measured of each contestant is beside FILE; those that are there already are not run again.
On a CPU, ``--device cpu`` with small sizes proves the Python, and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_BEGIN = time.time()

import torch  # noqa: E402
from gpu_step import contestants  # noqa: E402
from gpu_step.contestants import Contestant  # noqa: E402
from gpu_step.measurement import profiled, synchronize  # noqa: E402
from report import Report, Row, Sample  # noqa: E402

from gt_passes import DescribeOnly  # noqa: E402

OTHER_ORDER = "eager, other order of batches"
NAMES = (
    contestants.EAGER,
    contestants.TORCH_COMPILE,
    contestants.name_of_ours("full", recorded=True),
    contestants.name_of_ours("regional", recorded=True),
    OTHER_ORDER,
)
_LAST = 50
"""Steps at the end whose mean loss is told."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark, or the one contestant that ``--run`` names."""
    options = _parse(arguments)
    if options.run is not None:
        _run(options)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("bench_training_run: needs a CUDA device, and this machine has none\n")
        return 2
    told, report = {}, Report(benchmark="training_run")
    for name in NAMES:
        if options.only not in name:
            continue
        path = options.json.with_name(f"{options.json.stem}-{_file_name(name)}.json")
        if not path.exists():
            failure = _started(name, path, options)
            if failure is not None:
                report.notes.append(f"{name}: failed: {failure}")
                continue
        told[name] = json.loads(path.read_text())
        _write(report, told, options)
    _write(report, told, options)
    print(report.table())
    failed = any(": failed: " in note for note in report.notes)
    return 1 if failed or not told else 0


def _started(name: str, path: Path, options: argparse.Namespace) -> str | None:
    """Run one contestant in a process of its own; return how it failed, or None."""
    sizes = [f"--{size}={getattr(options, size)}" for size in _SIZES]
    command = [sys.executable, __file__, "--run", name, "--json", str(path), *sizes]
    try:
        ended = subprocess.run(
            [*command, "--device", options.device],
            timeout=options.limit,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {options.limit} s"
    sys.stderr.write(ended.stderr[-4000:])
    lines = ended.stderr.strip().splitlines()
    return None if ended.returncode == 0 else (lines or ["no message"])[-1]


def _run(options: argparse.Namespace) -> None:
    """Train one contestant, and write what was measured."""
    from training_run.model import predictor
    from training_run.text import token_rows

    name, device = options.run, torch.device(options.device)
    num_rows = options.steps * options.batch
    tokens_path = options.json.with_name(f"tokens-{num_rows}-{options.seq}-{options.vocab}.pt")
    if not tokens_path.exists():
        torch.save(token_rows(num_rows, options.seq, options.vocab), tokens_path)
    order = torch.randperm(
        num_rows, generator=torch.Generator().manual_seed(1 if name == OTHER_ORDER else 0)
    )
    rows = torch.load(tokens_path, weights_only=True)[order].to(device)
    batches = [
        (rows[i :: options.steps, :-1], rows[i :: options.steps, 1:]) for i in range(options.steps)
    ]
    batches = [(tokens.contiguous(), labels.contiguous()) for tokens, labels in batches]

    model = predictor(
        dim=options.dim,
        num_layers=options.layers,
        vocab=options.vocab,
        seq=options.seq,
        device=device,
        seed=0,
    )
    parameters = tuple(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=options.warm)
    ready = time.time()
    contestant = _contestant(name, model, batches[0], options)
    losses: list[torch.Tensor] = []
    seconds: list[float] = []

    def train(index: int) -> None:
        loss, gradients = contestant.step(*batches[index])
        losses.append(loss.detach().clone())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()

    begin = time.time()
    for index in range(options.steps):
        if index in (1, options.warm):
            synchronize(device)
            seconds.append(time.time())
        if index == options.warm and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        train(index)
    synchronize(device)
    seconds.append(time.time())
    first, warm, end = seconds
    memory = {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = {
            "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
            "device_gib": (total - free) / 2**30,
        }
    profile = profiled(lambda: train(options.steps - 1), device)
    measured = {
        "name": name,
        "num_parameters": sum(each.numel() for each in parameters),
        "losses": torch.stack(losses[: options.steps]).tolist(),
        "tokens_per_second": (options.steps - options.warm)
        * rows[0, 1:].numel()
        * options.batch
        / (end - warm),
        "seconds_before_the_model": ready - _BEGIN,
        "seconds_to_the_end_of_step_1": first - ready,
        "seconds_of_capture": begin - ready,
        "seconds_in_all": end - _BEGIN,
        "launches": profile.launches,
        "gpu_idle": profile.idle,
        "note": contestant.note,
        **memory,
    }
    options.json.write_text(json.dumps(measured, indent=1) + "\n")
    contestant.release()


def _contestant(
    name: str,
    model: torch.nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    options: argparse.Namespace,
) -> Contestant:
    on_gpu = options.device == "cuda"
    if name == contestants.TORCH_COMPILE:
        return contestants.torch_compile(model, backend="inductor" if on_gpu else "eager")
    for compilation in contestants.COMPILATIONS:
        if name == contestants.name_of_ours(compilation, recorded=True):
            return contestants.ours(
                model,
                batch,
                compilation=compilation,
                recorded=on_gpu,
                memory_policy="save_all",
                compiler=None if on_gpu else DescribeOnly(),
            )
    return contestants.eager(model)


def _write(report: Report, told: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the report of the contestants that have ended."""
    failures = [note for note in report.notes if ": failed: " in note]
    parameters = {each["num_parameters"] for each in told.values()}
    sizes = ", ".join(f"{number / 1e9:.2f}" for number in parameters)
    conditions = (
        f"Qwen3 of {sizes} billion parameters, {options.layers} layers, {options.batch} x "
        f"{options.seq} tokens a step, {options.steps} steps of AdamW, autocast to bfloat16; "
        f"tokens/s after {options.warm} steps"
    )
    report.notes[:] = [conditions, *failures]
    report.rows[:] = [
        Row(
            workload=name,
            metric=metric,
            unit=unit,
            ours=Sample.of([of(measured)]),
            peer=_sample(told.get(contestants.TORCH_COMPILE), of),
            peer_name=contestants.TORCH_COMPILE,
        )
        for name, measured in told.items()
        for (metric, unit), of in _METRICS.items()
        if of(measured) is not None
    ]
    eager = told.get(contestants.EAGER)
    for name, measured in told.items() if eager else ():
        differences = [
            abs(ours - theirs)
            for ours, theirs in zip(measured["losses"], eager["losses"], strict=True)
        ]
        report.rows += [
            Row(
                workload=name,
                metric=metric,
                unit="nats",
                ours=Sample.of([value]),
                peer_name=contestants.EAGER,
            )
            for metric, value in {
                "largest_difference_from_eager": max(differences),
                "mean_difference_from_eager": sum(differences) / len(differences),
            }.items()
        ]
    report.write(options.json)


def _sample(measured: dict[str, Any] | None, of: Any) -> Sample | None:
    value = None if measured is None else of(measured)
    return None if value is None else Sample.of([value])


_METRICS = {
    ("tokens_per_second", "tokens/s"): lambda each: each["tokens_per_second"],
    ("peak_allocated", "GiB"): lambda each: each.get("allocated_gib"),
    ("peak_reserved", "GiB"): lambda each: each.get("reserved_gib"),
    ("used_of_the_device", "GiB"): lambda each: each.get("device_gib"),
    ("first_step", "s"): lambda each: each["seconds_to_the_end_of_step_1"],
    ("launches", ""): lambda each: each["launches"],
    ("gpu_idle", "of the step"): lambda each: each["gpu_idle"],
    ("first_loss", "nats"): lambda each: each["losses"][0],
    ("last_losses", "nats"): lambda each: _mean(each["losses"][-_LAST:]),
}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-").replace(".", "-")


_SIZES = {
    "steps": 300,
    "warm": 20,
    "batch": 4,
    "seq": 2048,
    "dim": 2048,
    "layers": 16,
    "vocab": 32768,
}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the results")
    parser.add_argument("--only", default="", help="only contestants whose name contains this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=float, default=150, help="seconds for each contestant")
    parser.add_argument("--run", choices=NAMES, help="this one, in this process")
    for name, default in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
