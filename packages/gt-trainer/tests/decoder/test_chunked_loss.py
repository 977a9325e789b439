"""GraphChunkedLoss against the whole loss at once: value, every gradient, capture, refusals."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.utils import set_spmd_backend

from gt_trainer.decoder.chunked_loss import ChunkedLossError, GraphChunkedLoss

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 16, 24, 40


@pytest.fixture(autouse=True)
def _partial_dtensor_backend():
    set_spmd_backend("partial_dtensor")


class TinyModel(nn.Module):
    """Embedding, one layer, output projection; ``tied`` shares the outer two weights."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        if tied:
            self.embedding.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(tokens)))


def make_batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, 3] = labels[1, 10:] = IGNORE_INDEX
    return tokens, labels, (labels != IGNORE_INDEX).sum()


def make_loss(model, num_chunks=4):
    config = GraphChunkedLoss.Config(num_chunks=num_chunks, loss_fn=CrossEntropyLoss.Config())
    loss = config.build()
    loss.set_lm_head(model.lm_head)
    return loss


def chunked(model, batch, num_chunks=4):
    tokens, labels, valid = batch
    loss, metrics = make_loss(model, num_chunks)(model(tokens), labels, valid)
    assert metrics == {}
    return loss


def whole(model, batch):
    tokens, labels, valid = batch
    return CrossEntropyLoss.Config().build()(model.lm_head(model(tokens)), labels, valid)[0]


def gradients(loss, model):
    return dict(zip(names(model), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def names(model):
    return [name for name, _ in model.named_parameters()]


def relative_difference(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loss_and_every_gradient_agree_with_the_unchunked_loss(tied):
    model, batch = TinyModel(tied=tied), make_batch()
    ours, theirs = chunked(model, batch), whole(model, batch)
    assert relative_difference(ours, theirs) < 1e-5
    theirs = gradients(theirs, model)
    assert names(model) == list(theirs)
    for name, gradient in gradients(ours, model).items():
        assert relative_difference(gradient, theirs[name]) < 1e-5, name


def test_backward_fills_the_gradients_that_autograd_grad_returns():
    model, batch = TinyModel(tied=True), make_batch()
    returned = gradients(chunked(model, batch), model)
    chunked(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, returned[name]), name


def test_gradients_equal_those_of_torchtitans_own_chunked_loss():
    model, batch = TinyModel(), make_batch()
    ours = gradients(chunked(model, batch), model)
    tokens, labels, valid = batch
    peer = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config()).build()
    peer.set_lm_head(model.lm_head)
    loss, _ = peer(model(tokens), labels, valid)
    loss.backward()
    assert torch.equal(loss, chunked(model, batch))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, ours[name]), name


def test_an_upstream_gradient_scales_every_gradient():
    model, batch = TinyModel(), make_batch()
    once = gradients(chunked(model, batch), model)
    scaled = gradients(chunked(model, batch) * 4.0 + 7.0, model)
    for name, gradient in scaled.items():
        assert torch.equal(gradient, once[name] * 4.0), name


def test_without_gradients_it_returns_the_same_value_and_no_graph():
    model, batch = TinyModel(), make_batch()
    trained = chunked(model, batch)
    with torch.no_grad():
        validated = chunked(model, batch)
    assert torch.equal(validated, trained)
    assert trained.requires_grad
    assert not validated.requires_grad


def test_without_a_token_count_it_returns_the_sum_over_tokens():
    model, (tokens, labels, valid) = TinyModel(), make_batch()
    loss_fn = make_loss(model)
    total, _ = loss_fn(model(tokens), labels)
    mean, _ = loss_fn(model(tokens), labels, valid)
    torch.testing.assert_close(total / valid, mean)


def test_a_frozen_projection_still_passes_gradients_to_the_model():
    model, batch = TinyModel(), make_batch()
    model.lm_head.requires_grad_(False)
    expected = torch.autograd.grad(whole(model, batch), model.layer.weight)[0]
    loss = chunked(model, batch)
    assert relative_difference(torch.autograd.grad(loss, model.layer.weight)[0], expected) < 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_captured_step_has_every_gradient_and_the_same_bits(tied, dtype):
    model, batch = TinyModel(tied=tied, dtype=dtype), make_batch()

    def step(*batch):
        loss = chunked(model, batch)
        return (loss, *torch.autograd.grad(loss, list(model.parameters())))

    eager = step(*batch)
    graph = make_fx(step, tracing_mode="real")(*batch)
    for ours, theirs in zip(graph(*batch), eager, strict=True):
        assert torch.equal(ours, theirs)
    # The graph is a function of its inputs: another batch gets its own answer.
    tokens, labels, valid = batch
    other = (tokens.flip(0), labels.flip(0), valid + 1)
    for ours, theirs in zip(graph(*other), step(*other), strict=True):
        assert torch.equal(ours, theirs)


def test_weight_gradients_of_bfloat16_are_summed_in_float32():
    model, batch = TinyModel(dtype=torch.bfloat16), make_batch()
    ours = gradients(chunked(model, batch, num_chunks=16), model)["lm_head.weight"]
    tokens, labels, valid = batch
    parts = []
    for index in range(16):
        hidden = model(tokens)[:, index : index + 1]
        loss, _ = CrossEntropyLoss.Config().build()(
            model.lm_head(hidden), labels[:, index : index + 1], valid
        )
        parts.append(torch.autograd.grad(loss, model.lm_head.weight)[0])
    exactly, coarsely = parts[0].float(), parts[0]
    for part in parts[1:]:
        exactly = exactly + part.float()
        coarsely = coarsely + part
    assert torch.equal(ours, exactly.to(torch.bfloat16))
    assert not torch.equal(ours, coarsely)


def test_a_sequence_that_the_chunks_do_not_divide_is_refused():
    model, batch = TinyModel(), make_batch()
    with pytest.raises(ChunkedLossError) as refused:
        chunked(model, batch, num_chunks=5)
    assert str(refused.value) == (
        "pred has sequence length 16, which is not divisible by the loss's 5 chunks: choose "
        "another --training.seq_len or --loss.num_chunks"
    )
    assert isinstance(refused.value, ValueError)


def test_a_loss_without_its_projection_is_refused():
    model, (tokens, labels, valid) = TinyModel(), make_batch()
    loss = GraphChunkedLoss.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config()).build()
    with pytest.raises(ChunkedLossError) as refused:
        loss(model(tokens), labels, valid)
    assert str(refused.value) == (
        "the chunked loss has no output projection: call set_lm_head(model.lm_head) first"
    )
