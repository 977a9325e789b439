"""The peers as contestants: torchtitan's graph_trainer, its eager mode, and core torchtitan.

Run as a program, this is one rank: ``python -m train_step.peers PEER WORKLOAD FOLDER`` with the
rendezvous in the environment. What is changed about the peers, all of it because they run on CPU or
to make the comparison fair, is this:

- The device adapter is ours (``gt_trainer.device``), as is the inner attention, with its mask built
  in ``post_dataloading_process``: FlexAttention has no backward on CPU.
- Routed experts are ours, which compute in float32 as all else does.
- Initial weights are drawn whole on each rank (``gt_trainer.decoder.initialization``), as ours are,
  so that all contestants train the same model.
- FSDP2 reduces by sum (``set_force_sum_reduction_for_comms``): gloo knows no other reduction that
  FSDP2 asks for.
- graph_trainer's passes for CUDA graphs are off, there being none on a CPU, and so are those that
  recompute activations, since nobody recomputes here.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gt_trainer.device import install

install("cpu")  # before the imports below, whose modules copy their device

import torch  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from gt_trainer.decoder.attention import attention_mask_for, replace_inner_attention  # noqa: E402
from gt_trainer.decoder.experts import replace_inner_experts  # noqa: E402
from gt_trainer.decoder.initialization import draw_whole_weights  # noqa: E402
from gt_trainer.startup import StartupClock  # noqa: E402
from train_step.commands import CommandedTraining  # noqa: E402
from train_step.workloads import WORKLOADS, Workload, shared_settings  # noqa: E402

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["CONFIGURATIONS", "main"]

_PASSES_OFF = (
    "cudagraph_pass",
    "insert_kernel_annotations_pass",
    "tag_with_memory_policy_pass",
    "apply_cpu_offload_pass",
    "selective_activation_remat_pass",
)


class PeerOnCpu(CommandedTraining):
    """What every peer needs here; mix it in before its trainer."""

    def __init__(self, config: Any) -> None:
        self.startup = StartupClock()
        with self.startup.part("setup"):
            super().__init__(config)  # type: ignore[call-arg]  # the trainer's, next in line

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As the trainer's, plus the mask that our attention takes."""
        trainer: Any = super()
        inputs, labels, extra_kwargs = trainer.post_dataloading_process(input_dict, labels)
        model = self.model_parts[0]  # type: ignore[attr-defined]  # the trainer's
        mask = attention_mask_for(model, extra_kwargs.get("positions"))
        if mask is not None:
            extra_kwargs["attention_masks"] = mask
        return inputs, labels, extra_kwargs


def core(workload: Workload) -> Trainer.Config:
    """Core torchtitan: FSDP2, no capture."""
    from torch.distributed.fsdp import FSDPModule

    class Contestant(PeerOnCpu, Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

    registry = importlib.import_module(f"torchtitan.models.{workload.module}.config_registry")
    published = getattr(registry, workload.config)()

    def force_sum(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    return _configured(Contestant.Config, published, workload, after_placement=force_sum)


def graph(workload: Workload) -> Trainer.Config:
    """graph_trainer in its graph mode: forward, loss and backward captured, its passes applied."""
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    options = GraphTrainerCompileConfig(
        enable=True, mode="aot_fx_trace", disable_passes=list(_PASSES_OFF)
    )
    return _graph_trainer(workload, options)


def eager(workload: Workload) -> Trainer.Config:
    """graph_trainer without capture: the same model on its SimpleFSDP, run eagerly."""
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    return _graph_trainer(workload, GraphTrainerCompileConfig(enable=False, mode=None))


CONFIGURATIONS: dict[str, Callable[[Workload], Trainer.Config]] = {
    "graph": graph,
    "eager": eager,
    "core": core,
}


def _graph_trainer(workload: Workload, options: Any) -> Trainer.Config:
    family = f"torchtitan.experiments.graph_trainer.{workload.module}.config_registry"
    registry = importlib.import_module(family)
    from torchtitan.experiments.graph_trainer import trainer as their_trainer

    class Contestant(PeerOnCpu, their_trainer.GraphTrainer):
        @dataclass(kw_only=True, slots=True)
        class Config(their_trainer.GraphTrainer.Config):
            pass

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            _time_capture(their_trainer, self.startup)

    published = getattr(registry, f"graph_trainer_{workload.config}")()
    return _configured(Contestant.Config, published, workload, compile=options)


def _time_capture(their_trainer: Any, clock: StartupClock) -> None:
    """Count their capture and passes as such, at the two calls that their trainer makes."""
    apply_passes = their_trainer.apply_graph_passes

    def timed_passes(*args: Any, **kwargs: Any) -> Any:
        with clock.part("passes"):
            return apply_passes(*args, **kwargs)

    their_trainer.apply_graph_passes = timed_passes
    their_trainer.log_timer = lambda label: clock.part("capture")  # it times the tracing only


def _configured(
    config_class: type[Trainer.Config],
    published: Trainer.Config,
    workload: Workload,
    *,
    after_placement: Callable[[torch.nn.Module], None] = lambda model: None,
    **more: Any,
) -> Trainer.Config:
    spec: ModelSpec | None = published.model_spec
    assert spec is not None
    replace_inner_attention(spec.model)
    replace_inner_experts(spec.model)
    place = spec.parallelize_fn

    def place_on_cpu(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        placed: torch.nn.Module = place(model, **options)
        after_placement(placed)
        draw_whole_weights(placed)
        return placed

    fields = {field.name: getattr(published, field.name) for field in dataclasses.fields(published)}
    fields |= shared_settings(workload)
    fields["model_spec"] = dataclasses.replace(spec, parallelize_fn=place_on_cpu)
    return config_class(**fields | more)


def main(peer: str, workload: str, folder: str) -> None:
    """Be one rank of a peer."""
    init_logger()
    config = CONFIGURATIONS[peer](WORKLOADS[workload])
    config.dump_folder = folder
    trainer: Any = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
