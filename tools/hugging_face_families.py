"""Writes docs/hugging-face-families.md: which families of models are captured, bit for bit.

A small model of each family, with random weights, makes a training step eagerly and as a captured
graph, on batches that the capture has not seen. Every bit of the loss, the gradients and the
buffers is compared. Nothing is downloaded. Run it again with another transformers:
``.venv/bin/python tools/hugging_face_families.py``.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gt_trace import CaptureError, TracedStep, trace_step
from hugging_face_inputs import BATCH, LENGTH, OTHER_KINDS, VOCABULARY

PAGE = Path(__file__).parents[1] / "docs" / "hugging-face-families.md"

_NUM_SEEDS = 2
"""Batches that are compared, with the draws of dropout."""

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 8}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT,
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {**_GPT, "rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "phi": {},
    "phi3": {},
    "llama": {},
    "mistral": _HEADS,
    "mixtral": {**_HEADS, "num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3": _HEADS,
    "qwen3_moe": {**_HEADS, **_EXPERTS, "num_experts": 4},
    "gemma": _HEADS,
    "gemma2": {**_HEADS, "sliding_window": 8},
    "gemma3_text": {**_HEADS, "sliding_window": 8},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "cohere": {},
    "starcoder2": {},
    "stablelm": {},
    "granite": {},
    "smollm3": {},
    "gpt_oss": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "mamba": {"state_size": 8},
}
"""Names of ``model_type``, with what makes a small one where common names do not."""

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, labels, and which tokens are no padding; None of a batch without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of one family."""

    model: str
    num_operators: int | None
    """Of the captured step; None if there is none."""

    differing: Mapping[bool, tuple[str, ...]]
    """Names of what is not bitwise equal in some batch, with and without padding."""

    reason: str | None
    """Why there is no capture, or why it does not run."""

    @property
    def is_bitwise(self) -> bool:
        """Whether every bit of every batch with padding was that of the eager step."""
        return self.reason is None and not self.differing[True]


def small_model(family: str) -> nn.Module:
    """A model with random weights, as it is trained."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**_SMALL, **FAMILIES[family]})
    made = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    model: nn.Module = made
    return model.train()


def judge(family: str) -> Found:
    """Capture the training step of a small model, and compare it with the eager one.

    Args:
        family: of ``FAMILIES``.
    """
    name, num_operators, differing = "", 0, {}
    for padded in (True, False):
        model = small_model(family)
        name = type(model).__name__
        step = _step_of(model)
        try:
            traced = trace_step(step, module=model)(*_batch(0, padded=padded))
            bound = traced.bind(model)
            differing[padded] = _differing(model, step, bound, padded=padded)
        except CaptureError as error:
            return Found(model=name, num_operators=None, differing={}, reason=_sentence(error))
        if padded:
            num_operators = _num_operators(traced)
    return Found(model=name, num_operators=num_operators, differing=differing, reason=None)


def judge_other(family: str) -> Found:
    """Capture the training step of a model that is no plain decoder, and compare it.

    Args:
        family: a name in ``OTHER_KINDS``.
    """
    kind = OTHER_KINDS[family]
    model = kind.small_model(family)
    trainable = [each for each in model.parameters() if each.requires_grad]

    def step(inputs: dict[str, Any]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        loss = model(**inputs).loss
        return loss, torch.autograd.grad(loss, trainable, allow_unused=True)

    def batch(seed: int) -> dict[str, Any]:
        return kind.inputs(torch.Generator().manual_seed(seed))

    name = type(model).__name__
    try:
        traced = trace_step(step, module=model)(batch(0))
    except CaptureError as error:
        return Found(model=name, num_operators=None, differing={}, reason=_sentence(error))
    bound = traced.bind(model)
    names = ["loss", *(name for name, each in model.named_parameters() if each.requires_grad)]
    differing: dict[str, None] = {}
    for seed in range(1, 1 + _NUM_SEEDS):
        before = copy.deepcopy(model.state_dict())
        results = []
        for run in (step, bound):
            model.load_state_dict(before)
            torch.manual_seed(seed)
            loss, gradients = run(batch(seed))
            buffers = {key: each.clone() for key, each in model.named_buffers()}
            results.append({**dict(zip(names, (loss, *gradients), strict=True)), **buffers})
        eager, captured = results
        differing |= {key: None for key in eager if not _same(eager[key], captured[key])}
    return Found(
        model=name,
        num_operators=_num_operators(traced),
        differing={True: tuple(differing)},
        reason=None,
    )


def judge_all() -> tuple[dict[str, Found], dict[str, Found]]:
    """Judge every decoder, and every model of another kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            {family: judge(family) for family in FAMILIES},
            {family: judge_other(family) for family in OTHER_KINDS},
        )


def page(found: Mapping[str, Found], others: Mapping[str, Found]) -> str:
    """Return the whole text of docs/hugging-face-families.md."""
    head = _HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        bitwise=sum(each.is_bitwise for each in found.values()),
        all=len(found),
    )
    rows = [
        f"| {family} | {each.model} | {each.num_operators or '–'} | "
        f"{_verdict(each, padded=True)} | {_verdict(each, padded=False)} |"
        for family, each in found.items()
    ]
    other_rows = [
        f"| {family} | {OTHER_KINDS[family].kind} | {each.model} | {each.num_operators or '–'} | "
        f"{_verdict(each, padded=True)} |"
        for family, each in others.items()
    ]
    return "\n".join([head, *rows, _OTHERS_HEAD, *other_rows, ""])


_HEAD = """\
# Families of transformers that are captured

Written by `tools/hugging_face_families.py`, which a test runs again. A small model of each family,
as transformers {transformers} has it, with random weights and in training mode, makes a step: the
loss and all gradients. {bitwise} of {all} make one whose every bit is that of the eager step, on
batches that the capture has not seen, with padding and a mask of it. On a CPU, in float32, torch
{torch}. What is not in the table was not tried.

Without padding, transformers leaves the mask out when it runs eagerly, and makes one when it is
traced (`is_tracing` in its `utils/import_utils.py`): the graph computes the same by other
operators, and where heads are grouped gradients may differ in their last bits. Give a mask of
padding, and both do the same.

| family | class | operators | with padding | without |
|---|---|---|---|---|"""


_OTHERS_HEAD = """
## Other kinds of models

Each is compared in the same way: loss, gradients and buffers after each of two batches. A model
that cannot be captured is refused with the reason that the table shows.

| family | kind | class | operators | result |
|---|---|---|---|---|"""


def _num_operators(traced: TracedStep) -> int:
    return sum(node.op == "call_function" for node in traced.graph_module.graph.nodes)


def _step_of(model: nn.Module) -> Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]:
    trainable = [each for each in model.parameters() if each.requires_grad]

    def step(
        tokens: Tensor, labels: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        loss = model(input_ids=tokens, labels=labels, attention_mask=mask, use_cache=False).loss
        return loss, torch.autograd.grad(loss, trainable, allow_unused=True)

    return step


def _batch(seed: int, *, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if not padded:
        return tokens, tokens.clone(), None
    lengths = torch.tensor([LENGTH, LENGTH - 5 - seed])
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    return tokens * mask, tokens.masked_fill(mask == 0, -100), mask


def _differing(
    model: nn.Module, step: Callable[..., Any], bound: Callable[..., Any], *, padded: bool
) -> tuple[str, ...]:
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    differing: dict[str, None] = {}
    for seed in range(1, 1 + _NUM_SEEDS):
        results = []
        for run in (step, bound):
            torch.manual_seed(seed)
            loss, gradients = run(*_batch(seed, padded=padded))
            results.append((loss, *gradients))
        for name, eager, captured in zip(["loss", *names], *results, strict=True):
            if not _same(eager, captured):
                differing[name] = None
    return tuple(differing)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(
        one.detach().flatten().view(torch.uint8), other.detach().flatten().view(torch.uint8)
    )


def _sentence(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.lstrip().startswith("File ")]
    text = re.sub(r"/\S*/site-packages/", "", " ".join(" ".join(lines).split()))
    return text.replace("|", "\\|")


def _verdict(found: Found, *, padded: bool) -> str:
    if found.reason is not None:
        return f"no: {found.reason}" if padded else "–"
    differing = found.differing[padded]
    if not differing:
        return "bitwise"
    return (
        f"other bits in {len(differing)} tensors{', the loss too' if 'loss' in differing else ''}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(*judge_all()), encoding="utf-8")
