"""A pipeline stage that uses autograd: it shows that the runner needs no graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from gt_config.node_keys import OverlappedBackward
from gt_pipeline.runner import ActivationSignature, MicrobatchInputs, PipelineStageGraphs
from gt_pipeline.runner.stage_protocol import Tensors


class EagerStage:
    """A module, and for the last stage a loss, behind the interface of a graph stage.

    Args:
        module: takes the activations, or the caller's arguments if it is the first stage.
        stage_index: of the stage.
        num_stages: of the pipeline.
        activation: what travels between stages, one tensor.
        loss_fn: of the module's output and the target; of the last stage.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_index: int,
        num_stages: int,
        activation: ActivationSignature,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.input_signature = () if stage_index == 0 else (activation,)
        self.output_signature = (activation,)
        self._loss_fn = loss_fn
        if stage_index == num_stages - 1:
            loss = ActivationSignature(shape=(), dtype=torch.float32, requires_grad=True)
            self.output_signature = (loss,)
        self._saved: dict[int, tuple[Tensors, Tensor]] = {}
        self._gradients: dict[str, Tensor] = {}
        self.calls: list[str] = []
        """Every method that was called, for tests of the order of calls."""

    @property
    def num_saved(self) -> int:
        return len(self._saved)

    def unshard(self) -> None:
        self.calls.append("unshard")

    def reshard(self) -> None:
        self.calls.append("reshard")

    def forward(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        self.calls.append(f"forward {microbatch}")
        leaves = tuple(each.detach().requires_grad_() for each in activations)
        with torch.enable_grad():
            output = self._compute(leaves, inputs)
        self._saved[microbatch] = (leaves, output)
        return (output.detach(),)

    def full_backward(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        self.calls.append(f"full_backward {microbatch}")
        leaves, output = self._saved.pop(microbatch)
        parameters = dict(self.module.named_parameters())
        gradients = torch.autograd.grad(
            output, (*leaves, *parameters.values()), output_gradients, allow_unused=True
        )
        self._accumulate(parameters, gradients[len(leaves) :])
        return gradients[: len(leaves)]

    def backward_input(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        self.calls.append(f"backward_input {microbatch}")
        leaves, output = self._saved[microbatch]
        self._saved[microbatch] = (output_gradients, output)
        if not leaves:
            return ()
        return torch.autograd.grad(output, leaves, output_gradients, retain_graph=True)

    def backward_weight(self, microbatch: int) -> None:
        self.calls.append(f"backward_weight {microbatch}")
        output_gradients, output = self._saved.pop(microbatch)
        parameters = dict(self.module.named_parameters())
        gradients = torch.autograd.grad(
            output, tuple(parameters.values()), output_gradients, allow_unused=True
        )
        self._accumulate(parameters, gradients)

    def overlap(
        self,
        microbatch: int,
        activations: Tensors,
        inputs: MicrobatchInputs,
        *,
        backward_stage: PipelineStageGraphs,
        backward_kind: OverlappedBackward,
        backward_microbatch: int,
        output_gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        outputs = self.forward(microbatch, activations, inputs)
        if backward_kind == "FULL_BACKWARD":
            return outputs, backward_stage.full_backward(backward_microbatch, output_gradients)
        return outputs, backward_stage.backward_input(backward_microbatch, output_gradients)

    def reduce_gradients(self) -> None:
        self.calls.append("reduce_gradients")

    def evaluate(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        self.calls.append(f"evaluate {microbatch}")
        return (self._compute(activations, inputs),)

    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self.module.named_parameters())

    def gradients(self) -> Mapping[str, Tensor]:
        return dict(self._gradients)

    def discard(self) -> None:
        self.calls.append("discard")
        self._saved = {}
        self._gradients = {}

    def _compute(self, activations: Tensors, inputs: MicrobatchInputs) -> Tensor:
        arguments = inputs.args if self.stage_index == 0 else activations
        output: Tensor = self.module(*arguments)
        return output if self._loss_fn is None else self._loss_fn(output, inputs.target)

    def _accumulate(
        self, parameters: Mapping[str, Tensor], gradients: tuple[Tensor | None, ...]
    ) -> None:
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            if name in self._gradients:
                self._gradients[name] += gradient
            else:
                self._gradients[name] = gradient.clone()
