"""What of a model decides time and memory: parameters, and products of one token. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """One layer. Products are elements of the weights that a token is multiplied with."""

    dense_parameters: int
    expert_parameters: int = 0
    """Of routed experts, which expert parallelism divides."""

    dense_products: int
    expert_products: float = 0.0
    """Of the experts that a token is sent to."""

    repeated_dense: int
    """Of the products, those whose results the backward needs, so that a layer that is recomputed
    multiplies again: all but the last of its feed-forward."""

    repeated_experts: float = 0.0
    attention_width: int
    """Heads times width of a head, of the values."""

    query_width: int
    """The same of the queries."""

    keys_values_width: int
    """Of keys and values together, which context parallelism gathers."""

    outputs_width: float
    """Sum of the widths of all products' results, for one token."""

    expert_outputs_width: float = 0.0
    """Of it, those of the experts that it is sent to."""

    sent_copies: float = 0.0
    """Experts that a token is sent to."""

    expert_layers: int = 0
    """1 if it has routed experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCounts:
    """A decoder of layers between an embedding and a projection to logits."""

    layers: tuple[LayerCounts, ...]
    embedding_parameters: int
    output_parameters: int
    """Of what follows the layers."""

    output_products: int
    """Of the projection to logits."""

    loss_chunks: int
    """Parts of a sequence, of each of which the loss is taken alone."""

    dim: int
    seq_len: int
    products_dtype: str
    """Of activations and gathered weights, as ``bfloat16``."""

    parameter_bytes: int
    """Of one parameter as stored, of its gradient, and of each state of the optimizer."""

    flops_per_token: int
    """torchtitan's count, for MFU."""

    max_tp: int
    """Heads that tensor parallelism can divide: their greatest common divisor."""

    num_experts: int | None

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        ends = self.embedding_parameters + self.output_parameters
        return ends + sum(each.dense_parameters + each.expert_parameters for each in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Of one element of an activation."""
        return 4 if self.products_dtype == "float32" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What one stage of a pipeline has: some layers, and possibly an end of the model."""

    num_layers: int
    layers: LayerCounts
    """Sums over its layers."""

    dense_parameters: int
    """Those of its ends too."""

    output_products: int

    @classmethod
    def of(
        cls, model: ModelCounts, layers: range, *, has_embedding: bool, has_output: bool
    ) -> StageParts:
        """The stage that has these layers of a model."""
        chosen = [model.layers[index] for index in layers]
        sums: dict[str, Any] = {
            field.name: sum(getattr(layer, field.name) for layer in chosen)
            for field in fields(LayerCounts)
        }
        ends = model.embedding_parameters * has_embedding + model.output_parameters * has_output
        return cls(
            num_layers=len(chosen),
            layers=LayerCounts(**sums),
            dense_parameters=sums["dense_parameters"] + ends,
            output_products=model.output_products * has_output,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Which rank of a pipeline has which stages."""

    stages: tuple[StageParts, ...]
    by_rank: tuple[tuple[int, ...], ...]
    """Indices of the stages of each rank, ascending."""

    def of_rank(self, rank: int) -> list[StageParts]:
        """The stages of a rank."""
        return [self.stages[index] for index in self.by_rank[rank]]


def whole_model(model: ModelCounts) -> PipelineLayout:
    """The layout without a pipeline."""
    layers = range(len(model.layers))
    stage = StageParts.of(model, layers, has_embedding=True, has_output=True)
    return PipelineLayout(stages=(stage,), by_rank=((0,),))
