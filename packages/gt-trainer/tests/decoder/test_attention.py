"""DocumentCausalSDPA: documents do not see each other, and one kernel computes it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.models.common.attention import FlexAttention

import gt_trainer.decoder.attention as attention_module
from gt_trainer.decoder.attention import (
    AttentionMaskError,
    DocumentCausalSDPA,
    attention_mask_for,
    document_causal_mask,
    flex_attention_options,
)

BATCH, LENGTH = 2, 12
SPLIT = 5  # the second document of each sample starts here
POSITIONS = torch.tensor([[*range(SPLIT), *range(LENGTH - SPLIT)]] * BATCH)

# heads, key-value heads, query width, value width
SHAPES = {
    "multi-head": (4, 4, 8, 8),
    "grouped": (4, 2, 8, 8),
    "latent, values narrower": (4, 4, 12, 8),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def make_qkv(shape, dtype=torch.float32, seed=0):
    heads, kv_heads, width, value_width = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads, last):
        drawn = torch.randn(BATCH, LENGTH, num_heads, last, generator=generator, dtype=dtype)
        return drawn.requires_grad_()

    return draw(heads, width), draw(kv_heads, width), draw(kv_heads, value_width)


def attend(q, k, v, mask, **options):
    attention = DocumentCausalSDPA.Config().build()
    return attention(q, k, v, attention_masks=mask, enable_gqa=q.shape[2] != k.shape[2], **options)


def attend_densely(q, k, v, mask, scale):
    """The definition: full scores, masked, in float64."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.einsum("bnqk,bknh->bqnh", weights, v)


def test_the_mask_is_causal_within_each_document():
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 1, 0]])
    mask = document_causal_mask(positions)
    assert mask.shape == (2, 1, 5, 5)
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert mask[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@every_shape
def test_the_output_is_that_of_dense_masked_attention(shape):
    q, k, v = make_qkv(shape)
    mask = document_causal_mask(POSITIONS)
    for scale in (None, 0.3):
        out = attend(q, k, v, mask, scale=scale)
        dense = attend_densely(q, k, v, mask, shape[2] ** -0.5 if scale is None else scale)
        assert out.shape == (BATCH, LENGTH, shape[0], shape[3])
        torch.testing.assert_close(out.double(), dense, rtol=1e-5, atol=1e-6)


@every_shape
def test_a_token_of_one_document_changes_no_bit_of_another(shape):
    mask = document_causal_mask(POSITIONS)
    q, k, v = make_qkv(shape)
    out = attend(q, k, v, mask)
    first, second = slice(0, SPLIT), slice(SPLIT, LENGTH)
    for changed, untouched in ((first, second), (second, first)):
        others = [t.detach().clone() for t in (q, k, v)]
        for tensor, replacement in zip(others, make_qkv(shape, seed=1), strict=True):
            tensor[:, changed] = replacement[:, changed].detach()
        out_of_others = attend(*others, mask)
        assert torch.equal(out[:, untouched], out_of_others[:, untouched])
        assert not torch.equal(out[:, changed], out_of_others[:, changed])


@every_shape
def test_no_gradient_flows_from_one_document_into_another(shape):
    mask = document_causal_mask(POSITIONS)
    q, k, v = make_qkv(shape)
    out = attend(q, k, v, mask)
    gradients = torch.autograd.grad(out[:, SPLIT:].square().sum(), (q, k, v))
    for gradient in gradients:
        assert torch.count_nonzero(gradient[:, :SPLIT]) == 0
        assert torch.count_nonzero(gradient[:, SPLIT:]) > 0


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_captured_graph_holds_the_same_kernel_and_gives_the_same_bits(shape, dtype):
    def step(q, k, v, mask):
        out = attend(q, k, v, mask)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    inputs = (*make_qkv(shape, dtype), document_causal_mask(POSITIONS))
    eager = step(*inputs)
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    attention_ops = [
        str(node.target)
        for node in graph.graph.nodes
        if "scaled_dot_product" in str(node.target) or "bmm" in str(node.target)
    ]
    assert attention_ops == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    ]
    for ours, theirs in zip(graph(*inputs), eager, strict=True):
        assert torch.equal(ours, theirs)


def test_the_number_of_threads_changes_no_bit():
    mask = document_causal_mask(POSITIONS)
    inputs = make_qkv(SHAPES["grouped"])

    def run():
        out = attend(*inputs, mask)
        return (out, *torch.autograd.grad(out.square().sum(), inputs))

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(2)
        two = run()
    finally:
        torch.set_num_threads(threads)
    for ours, theirs in zip(one, two, strict=True):
        assert torch.equal(ours, theirs)


def test_positions_of_a_wrong_shape_are_refused():
    with pytest.raises(AttentionMaskError) as refused:
        document_causal_mask(torch.arange(4))
    assert str(refused.value) == "positions have shape (4,); allowed: (batch, sequence)"


@every_shape
def test_attention_that_is_written_out_is_the_kernels(shape):
    found, expected = make_qkv(shape), make_qkv(shape)
    mask = document_causal_mask(POSITIONS)
    sums = []

    def keep(out, lse):
        sums.append(lse)
        return out

    out = attend(*found, mask, out_transform=keep)
    out_of_kernel = attend(*expected, mask)
    torch.testing.assert_close(out, out_of_kernel)
    out.square().sum().backward()
    out_of_kernel.square().sum().backward()
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    # The first token of a document sees itself alone.
    query, key = (each.detach()[:, SPLIT, 0] for each in found[:2])
    alone = (query * key).sum(-1) * query.shape[-1] ** -0.5
    torch.testing.assert_close(sums[0][:, SPLIT, 0].detach(), alone)


def test_sums_of_scores_are_differentiated():
    q, k, v = make_qkv(SHAPES["grouped"], dtype=torch.float64)
    mask = document_causal_mask(POSITIONS)
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_()

    def with_sinks(q, k, v, sinks):
        # As gpt_oss: another score, of which there is no value.
        def rescale(out, lse):
            return out * torch.sigmoid(lse - sinks.view(1, 1, -1)).unsqueeze(-1)

        return attend(q, k, v, mask, out_transform=rescale)

    assert torch.autograd.gradcheck(with_sinks, (q, k, v, sinks))


def test_a_missing_mask_is_refused():
    with pytest.raises(AttentionMaskError) as refused:
        attend(*make_qkv(SHAPES["multi-head"]), None)
    assert str(refused.value) == (
        "attention_masks is NoneType; allowed: a bool tensor of shape (2, 1, 12, 12), from "
        "document_causal_mask(positions)"
    )


def test_a_mask_of_another_batch_is_refused():
    with pytest.raises(AttentionMaskError) as refused:
        attend(*make_qkv(SHAPES["multi-head"]), document_causal_mask(POSITIONS[:1]))
    assert str(refused.value) == (
        "attention_masks has dtype torch.bool and shape (1, 1, 12, 12); allowed: a bool tensor of "
        "shape (2, 1, 12, 12), from document_causal_mask(positions)"
    )


class _Attention:
    inner_attention = DocumentCausalSDPA.Config()


class _ModelConfig:
    first_attention = _Attention()


class _Model:
    config = _ModelConfig()


def test_a_model_with_our_attention_gets_the_mask_of_its_positions():
    mask = attention_mask_for(_Model(), POSITIONS)
    assert torch.equal(mask, document_causal_mask(POSITIONS))
    assert attention_mask_for(SimpleNamespace(config=object()), POSITIONS) is None


def test_a_batch_without_positions_is_refused_when_the_model_needs_them():
    with pytest.raises(AttentionMaskError) as refused:
        attention_mask_for(_Model(), None)
    assert str(refused.value) == (
        "the model attends within documents, but the batch holds no 'positions': the data loader "
        "must give the position of each token in its document, shape (batch, sequence)"
    )


def test_flex_attention_is_compiled_as_torchtitan_does_eagerly(monkeypatch):
    configs = {**FlexAttention.inductor_configs, "max_autotune": True}
    monkeypatch.setattr(FlexAttention, "inductor_configs", configs)
    monkeypatch.setattr(attention_module, "intended_device_type", lambda: "cpu")
    assert flex_attention_options() is None
    monkeypatch.setattr(attention_module, "intended_device_type", lambda: "cuda")
    found = flex_attention_options()
    assert found.keys() == {"max_autotune", "coordinate_descent_tuning", "triton.cudagraphs"}
    assert found["max_autotune"]
    # As torchtitan does for deterministic runs, long after it was imported.
    configs["max_autotune"] = False
    assert flex_attention_options() == {**found, "max_autotune": False}
    # And for those on ROCm.
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", flex_attention)
    assert flex_attention_options() is None
