"""How many collectives does a step launch: as captured, and with FSDP communication bucketed?

Llama 3 8B on 64 ranks that do not exist, FSDP over all of them::

    python benchmarks/bench_collectives.py [--json FILE] [--layers 32]

Counts do not vary, so each is taken once. Goals are for 32 layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from graph_passes.captured import WORKLOADS, CapturedModel, captured_model
from graph_passes.peer import PEER_NAME, annotate_for_peer, run_peer_passes
from report import Report, Row, Sample
from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_passes import default_recipe
from gt_passes.analysis.collectives import collective_bytes
from gt_trace import collective_counts

_GOALS = {"gathered weights are kept": 70, "gathered again for backward": 105}
_PADDING_GOAL = 0.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args(arguments)
    report = Report(benchmark="collectives")
    with captured_model(options.layers, WORKLOADS["8B"]) as model:
        _measure(model, report)
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _measure(model: CapturedModel, report: Report) -> None:
    name = f"llama3 8B, {model.num_layers} layers, {WORKLOADS['8B'].world_size} ranks"
    captured = _count(model.graph())
    captured_bytes = collective_bytes(model.graph())
    row = Row(workload=name, metric="collectives", unit="", ours=Sample.of([captured]))
    report.rows.append(dataclasses.replace(row, metric="collectives, as captured"))
    peer = Sample.of([_count(_peer_graph(model))])
    for variant, goal in _GOALS.items():
        graph_module = model.graph()
        default_recipe(
            CompileConfig(memory_policy="save_all", verify_passes=False),
            context=model.context(),
            reshard_after_forward=variant != "gathered weights are kept",
        ).run(graph_module)
        count = _count(graph_module)
        # Without recomputation, the peer keeps gathered weights; it has no other bucketing to show.
        has_peer = variant == "gathered weights are kept"
        report.rows.append(
            dataclasses.replace(
                row,
                metric=f"collectives, bucketed, {variant}",
                ours=Sample.of([count]),
                peer=peer if has_peer else None,
                peer_name=PEER_NAME if has_peer else None,
            )
        )
        report.notes.append(
            f"bucketed, {variant}: {count}, asked for at most {goal}: "
            f"{'met' if count <= goal else 'missed'} ({_by_operator(graph_module)})"
        )
        if has_peer:
            # The same parameters are gathered once, and reduced once, before and after.
            deduplicated = model.graph()
            default_recipe(
                CompileConfig(fsdp_bucketing="off", prefetch_layers=0, verify_passes=False),
                context=model.context(),
                reshard_after_forward=False,
            ).run(deduplicated)
            whole = collective_bytes(deduplicated)
            padding = 100 * (collective_bytes(graph_module) - whole) / whole
            report.rows.append(
                dataclasses.replace(
                    row, metric="padding of buckets", unit="%", ours=Sample.of([padding])
                )
            )
            report.notes.append(
                f"padding {padding:.4f} % of the bytes, asked for at most {_PADDING_GOAL} %: "
                f"{'met' if padding <= _PADDING_GOAL else 'missed'}"
            )
    report.notes.append(f"as captured: {captured_bytes:,} bytes given to collectives on a rank")


def _peer_graph(model: CapturedModel) -> GraphModule:
    graph_module = model.graph()
    annotate_for_peer(graph_module)
    return run_peer_passes(graph_module, model)


def _by_operator(graph_module: GraphModule) -> str:
    counts = collective_counts(graph_module)
    return ", ".join(f"{count} {operator}" for operator, count in counts.items())


def _count(graph_module: GraphModule) -> int:
    return sum(
        node.op == "call_function" and _launches(str(node.target))
        for node in graph_module.graph.nodes
    )


def _launches(target: str) -> bool:
    """Whether an operator launches a collective; the peer's buckets have operators of their own."""
    return target.startswith("_c10d_functional.") and "wait_tensor" not in target


if __name__ == "__main__":
    sys.exit(main())
