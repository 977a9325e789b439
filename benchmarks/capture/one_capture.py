"""One capture, measured: ``python -m capture.one_capture CONTESTANT WORKLOAD LAYERS``.

CONTESTANT is ``full`` or ``stamped`` (ours), ``compared`` (ours both ways, which must be equal), or
``peer``: ``minimal_fx_tracer`` of torchtitan's graph_trainer, on its own model, placed by its own
SimpleFSDP. Building and placing is not counted.
Prints one line of JSON: CPU seconds, nodes, and the peak of memory above that of the interpreter
with torch loaded; of ours also what generating the code of the graph takes, which a stamped capture
leaves to the first run, after passes. Two things are changed about the peer: its inner attention,
which has no backward on a CPU (all contestants have ours), and 405B comes without Float8.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import resource
import sys
import time
from typing import Any, Literal

import torch

_AT_REST = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

from gt_trainer import device  # noqa: E402  # memory with torch alone is read first
from gt_trainer.steps.program import TracingOptions  # noqa: E402

device.install("cpu")  # before the imports below, whose modules copy their device

from capture.workloads import WORKLOADS  # noqa: E402
from gt_config import CaptureLayers  # noqa: E402
from gt_trainer.decoder.attention import replace_inner_attention  # noqa: E402
from gt_trainer.dry_run.fake_step import FakeStep, fake_step  # noqa: E402
from gt_trainer.steps.captured_step import trace_training_step  # noqa: E402

__all__ = ["main"]


def main(contestant: CaptureLayers | Literal["peer"], workload: str, num_layers: str) -> None:
    """Capture once and print what it took."""
    chosen = WORKLOADS[workload]
    config = _peer_config(chosen.config) if contestant == "peer" else _our_config(chosen.config)
    config.parallelism = dataclasses.replace(
        config.parallelism, tensor_parallel_degree=chosen.tensor_parallel_degree
    )
    published = config.model_spec.model.layers
    config.model_spec.model.layers = [
        copy.deepcopy(published[index % len(published)]) for index in range(int(num_layers))
    ]
    with fake_step(config, chosen.world_size) as step:
        begin = time.process_time()
        captured = _peer_capture(step) if contestant == "peer" else _our_capture(step, contestant)
        seconds = time.process_time() - begin
        peak = _peak_gib()
        traced = captured.pop("graph", None)
        if traced is not None:
            begin = time.process_time()
            traced.graph_module.code  # noqa: B018  # a stamped graph has none until it is asked for
            captured["code"] = {
                "seconds": time.process_time() - begin,
                "peak_gib": _peak_gib(),
            }
    record = {"cpu_seconds": seconds, "peak_gib": peak, **captured}
    sys.stdout.write(json.dumps(record) + "\n")


def _peak_gib() -> float:
    """Above the interpreter with torch."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - _AT_REST) / 2**20


def _our_config(name: str) -> Any:
    return getattr(importlib.import_module("gt_trainer.models.llama3"), name)()


def _peer_config(name: str) -> Any:
    config = _peer_405b() if name == "llama3_405b" else _peer_published(name)
    replace_inner_attention(config.model_spec.model)
    theirs = config.compile

    class Options(type(theirs)):  # type: ignore[misc]  # theirs, whichever it is
        """The peer's, with what our way of building a step asks for."""

        autoparallel = False

    config.compile = Options(
        **{field.name: getattr(theirs, field.name) for field in dataclasses.fields(theirs)}
    )
    return config


def _peer_published(name: str) -> Any:
    family = "torchtitan.experiments.graph_trainer.llama3.config_registry"
    return getattr(importlib.import_module(family), f"graph_trainer_{name}")()


def _peer_405b() -> Any:
    """As published but for Float8, which needs torchao: the 70B configuration with that model."""
    from torchtitan.experiments.graph_trainer.configs import to_graph_trainer_config
    from torchtitan.experiments.graph_trainer.llama3 import model_registry as peer_registry
    from torchtitan.models.llama3 import config_registry, model_registry

    published = config_registry.llama3_70b()
    config = to_graph_trainer_config(
        dataclasses.replace(
            published,
            model_spec=model_registry("405B"),
            training=dataclasses.replace(published.training, local_batch_size=2),
        ),
        peer_registry,
    )
    config.compile = type(_peer_published("llama3_8b").compile)(enable=True)
    return config


def _our_capture(step: FakeStep, contestant: CaptureLayers) -> dict[str, Any]:
    traced, stamping = trace_training_step(
        step.model,
        step.loss_fn,
        *step.inputs,
        options=TracingOptions(capture_layers=contestant, meta_device=step.meta_device),
    )
    if stamping is not None and not stamping.stamped:
        raise RuntimeError(f"nothing was stamped: {stamping}")
    if contestant == "compared" and (stamping is None or not stamping.compared):
        raise RuntimeError("nothing was compared")
    parts: dict[str, float] = {}
    if stamping is not None:
        parts = {
            "gate": stamping.gate_seconds,
            "trace": stamping.trace_seconds,
            "stamp": stamping.stamp_seconds,
        }
    return {"nodes": len(traced.graph_module.graph.nodes), "parts": parts, "graph": traced}


def _peer_capture(step: FakeStep) -> dict[str, Any]:
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
    from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

    traced = minimal_fx_tracer(make_fwd_bwd_step(step.model, step.loss_fn), module=step.model)(
        *_on_fake_device(step)
    )
    return {"nodes": len(traced.gm.graph.nodes), "parts": {}}


def _on_fake_device(step: FakeStep) -> tuple[Any, ...]:
    """The peer's tracer knows nothing of models on meta: its inputs are on meta too."""
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, step.inputs
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
