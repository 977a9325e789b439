"""What workers run to place models of transformers, which know nothing of us, on four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from placed_model_cases import mesh_2d, traced_collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from gt_autoparallel import PlacementRequest, place
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_autoparallel.problem.constraints import Constraints
from gt_trace import trace_step

VOCABULARY, BATCH, TOKENS, WIDTH, NUM_STEPS = 32, 4, 8, 16, 5
UNEVEN_VOCABULARY = 33
CLASSES, PIXELS, CHANNELS = 8, 16, 4
BATCH_LAYOUT = (Shard(0), Replicate())
Inputs = tuple[torch.Tensor, ...]


class Logits(nn.Module):
    """The model as a function from tensors, by the names of its arguments, to logits."""

    def __init__(self, model: nn.Module, *arguments: str) -> None:
        super().__init__()
        self.model = model
        self._arguments = arguments

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self._arguments, inputs, strict=True))
        logits: torch.Tensor = self.model(**given).logits
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceCase:
    """A model, and how it is trained."""

    build: Callable[[], nn.Module]
    memory_budget_bytes: int
    """Less than the fastest plan takes, so that parameters must be sharded."""

    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
    biases_of_keys: str = "no such parameter"
    """How the names end of parameters that softmax does not see: of their gradients there is
    nothing but rounding."""


def gpt2() -> Logits:
    """Learned positions, weights that are stored transposed, tied embeddings."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, use_cache=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Logits(GPT2LMHeadModel(config), "input_ids")


def qwen2() -> Logits:
    """Rotary positions, fewer heads of keys and values, biases on queries, keys and values."""
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return Logits(Qwen2ForCausalLM(config), "input_ids")


def bert() -> Logits:
    """An encoder; a vocabulary that no axis divides, which therefore is never cut."""
    config = BertConfig(
        vocab_size=UNEVEN_VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, intermediate_size=32,
        num_attention_heads=4, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return Logits(BertForMaskedLM(config), "input_ids")


def qwen2_moe() -> Logits:
    """Experts in grouped products, of tokens that are sorted by their experts."""
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        attn_implementation="eager", experts_implementation="grouped_mm",
    )  # fmt: skip
    return Logits(Qwen2MoeForCausalLM(config), "input_ids")


def vit() -> Logits:
    """Patches by a convolution, and a class for each image."""
    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=PIXELS, patch_size=4, num_channels=CHANNELS, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return Logits(ViTForImageClassification(config), "pixel_values")


def t5() -> Logits:
    """Attention across from a decoder to an encoder, with learned biases of positions."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return Logits(T5ForConditionalGeneration(config), "input_ids", "decoder_input_ids")


def whisper() -> Logits:
    """Convolutions along a sequence with strides, and attention across, both at once."""
    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=CHANNELS, d_model=WIDTH, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=TOKENS,
        max_target_positions=16, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return Logits(WhisperForConditionalGeneration(config), "input_features", "decoder_input_ids")


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


CASES = {
    # Not Adam: GPT-2's scores are (q . k + q . bias), of which softmax over keys does not see the
    # second term, so that the gradient of a key's bias is zero but for rounding, and Adam divides
    # it by its own size: two right runs part there by a step size at most. BERT and ViT have these
    # biases as parameters of their own. Rotary positions make them seen.
    "gpt2": HuggingFaceCase(build=gpt2, memory_budget_bytes=140_000, optimizer=sgd),
    "qwen2": HuggingFaceCase(build=qwen2, memory_budget_bytes=78_000, optimizer=adam),
    "bert": HuggingFaceCase(
        build=bert, memory_budget_bytes=100_000, optimizer=sgd, biases_of_keys="key.bias"
    ),
    # Adam magnified rounding to 1.4e-5 of the gradient of a bias of queries, in five steps.
    "qwen2_moe": HuggingFaceCase(build=qwen2_moe, memory_budget_bytes=190_000, optimizer=sgd),
    "vit": HuggingFaceCase(
        build=vit, memory_budget_bytes=100_000, optimizer=sgd, biases_of_keys="k_proj.bias"
    ),
    "t5": HuggingFaceCase(build=t5, memory_budget_bytes=200_000, optimizer=adam),
    "whisper": HuggingFaceCase(build=whisper, memory_budget_bytes=130_000, optimizer=sgd),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOnModel:
    """What a rank saw. Errors are relative, in norm, with the name of the worst tensor."""

    losses: tuple[tuple[float, float], ...]
    """Of each step: the placed model's over all ranks, and the whole model's."""

    worst_gradient: tuple[float, str]
    """Over all steps."""

    worst_parameter: tuple[float, str]
    """After the last step."""

    num_sharded: int
    """Parameters of which the plan shards at least one dim."""

    unpredicted: Mapping[tuple[str, str, int], int]
    """By how much the traced step's number of collectives of each kind differs from the plan's
    prediction, where it does."""

    key_bias_share: float
    """Of the gradient's norm in the last step, the part of biases of keys: of GPT-2's first layer's
    bias, or of all where such biases are parameters of their own, which are then not compared."""


def compare_hugging_face(name: str) -> FoundOnModel:
    """Some steps of the placed model, and of the whole model on each rank."""
    case = CASES[name]
    mesh = mesh_2d()
    torch.manual_seed(0)
    whole = case.build().train()
    placed = copy.deepcopy(whole)
    inputs, _ = _batch(whole, 0)
    request = PlacementRequest(
        constraints=Constraints(inputs={"*": BATCH_LAYOUT}, outputs={"*": BATCH_LAYOUT}),
        memory_budget_bytes=case.memory_budget_bytes,
        relative_gap=0.1,  # any plan of this size will do
    )
    plan = place(placed, mesh, inputs, request, ignore_hooks=True)
    optimizers = [case.optimizer(model.parameters()) for model in (placed, whole)]
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, str]] = []
    for step in range(NUM_STEPS):
        inputs, labels = _batch(whole, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _pass(placed, _mine(inputs, mesh), *_mine((labels,), mesh))
        dist.all_reduce(loss, group=mesh.get_group("data"))
        losses.append((loss.item(), _pass(whole, inputs, labels).item()))
        errors.append(_worst_error(_seen(_gradients(placed), case), _seen(_gradients(whole), case)))
        for optimizer in optimizers:
            optimizer.step()
    return FoundOnModel(
        losses=tuple(losses),
        worst_gradient=max(errors),
        worst_parameter=_worst_error(
            _seen(dict(placed.named_parameters()), case),
            _seen(dict(whole.named_parameters()), case),
        ),
        num_sharded=sum(
            any(p.is_shard() for p in layout) for layout in plan.parameter_layouts().values()
        ),
        unpredicted=_unpredicted(placed, plan, mesh, _batch(whole, 0))
        if dist.get_rank() == 0
        else {},
        key_bias_share=_key_bias_share(whole, case),
    )


def _batch(model: Logits, step: int) -> tuple[Inputs, torch.Tensor]:
    """What the model takes, and labels, of all ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets, labels = torch.randint(0, VOCABULARY, (3, BATCH, TOKENS), generator=generator)
    images = torch.randn(BATCH, CHANNELS, PIXELS, PIXELS, generator=generator)
    of_name = {
        "input_ids": tokens,
        "decoder_input_ids": targets,
        "pixel_values": images,
        "input_features": images[:, :, 0].contiguous(),
    }
    is_class = "pixel_values" in model._arguments
    return (
        tuple(of_name[name] for name in model._arguments),
        labels[:, 0] % CLASSES if is_class else labels,
    )


def _mine(tensors: Inputs, mesh: DeviceMesh) -> Inputs:
    return tuple(t.chunk(mesh.size(0))[mesh.get_local_rank("data")] for t in tensors)


def _pass(model: nn.Module, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean loss over the whole batch, with gradients."""
    loss = _loss(model(*inputs), labels)
    loss.backward()
    return loss.detach()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total / (BATCH * TOKENS)


def _unpredicted(
    model: nn.Module, plan: PlacementPlan, mesh: DeviceMesh, batch: tuple[Inputs, torch.Tensor]
) -> dict[tuple[str, str, int], int]:
    def step(inputs: Inputs, labels: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        loss = _loss(model(*inputs), labels)
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.autograd.grad(loss, trained, allow_unused=True)

    inputs, labels = batch
    traced = trace_step(step, module=model)(_mine(inputs, mesh), *_mine((labels,), mesh))
    found = traced_collectives(traced.graph_module.graph, mesh)
    found.subtract((c.kind, c.axis, c.num_bytes) for c in predicted_collectives(plan))
    return {collective: number for collective, number in found.items() if number}


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _worst_error(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    assert set(found) == set(wanted)
    with torch.no_grad():
        return max(
            (float((_whole(found[name]) - wanted[name]).norm() / wanted[name].norm()), name)
            for name in wanted
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _seen(tensors: Mapping[str, torch.Tensor], case: HuggingFaceCase) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if not n.endswith(case.biases_of_keys)}


def _key_bias_share(model: nn.Module, case: HuggingFaceCase) -> float:
    gradients = _gradients(model)
    in_gpt2 = gradients.get("model.transformer.h.0.attn.c_attn.bias")
    if in_gpt2 is not None:
        return float(in_gpt2[WIDTH : 2 * WIDTH].norm() / in_gpt2.norm())
    unseen = [g.norm() for n, g in gradients.items() if n.endswith(case.biases_of_keys)]
    whole = torch.stack([g.norm() for g in gradients.values()]).norm()
    return float(torch.stack(unseen).norm() / whole) if unseen else 0.0
