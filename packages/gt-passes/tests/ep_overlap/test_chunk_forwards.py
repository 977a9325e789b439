"""Wrapping a forward: whose it is, what is cut and joined in it, and what it cannot be given."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from chunked_models import WIDTH
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gt_passes.ep_overlap import (
    InputLayout,
    TokenDims,
    chunk_forwards,
)
from gt_passes.errors import ForwardChunkingError


class Doubles(nn.Module):
    """Returns what it is told to make of its input."""

    def __init__(self, make=lambda x: x * 2) -> None:
        super().__init__()
        self.make = make

    def forward(self, x, extra=None, *more, **named):
        return self.make(x)


def model_of(block: nn.Module) -> nn.Module:
    return nn.ModuleDict({"block": block})


def wrapped(block: nn.Module, **kwargs) -> nn.Module:
    chunk_forwards(model_of(block), modules="block", **({"chunk_dim": "batch"} | kwargs))
    return block


def test_only_the_named_instances_are_wrapped():
    model = nn.ModuleDict({"a": Doubles(), "b": Doubles()})
    handle = chunk_forwards(model, modules="a", chunk_dim="batch")
    assert "forward" in vars(model["a"])
    assert "forward" not in vars(model["b"])
    handle.undo()
    assert "forward" not in vars(model["a"])


def test_a_forward_of_the_instance_comes_back():
    block = Doubles()
    own = lambda x: x + 1  # noqa: E731  # a forward put on the instance
    block.forward = own
    handle = chunk_forwards(model_of(block), modules="block", chunk_dim="batch")
    assert torch.equal(block(torch.zeros(2, 3)), torch.ones(2, 3))
    handle.undo()
    assert block.forward is own


def test_a_wrapper_that_fails_takes_the_others_off():
    class HasNoForward(Doubles):
        def __getattribute__(self, name):
            if name == "forward":
                raise AttributeError("of the module")
            return super().__getattribute__(name)

    model = nn.ModuleDict({"a": Doubles(), "b": HasNoForward()})
    with pytest.raises(AttributeError, match="has no attribute 'forward'"):
        chunk_forwards(model, modules="*", chunk_dim="batch")
    assert "forward" not in vars(model["a"])


def test_the_handle_knows_the_roots():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Doubles(), "1": Doubles()})})
    with chunk_forwards(model, modules="layers.*", chunk_dim="batch") as handle:
        assert handle.roots == ("layers.0", "layers.1")


def test_undoing_below_a_later_wrapper_is_refused():
    block = Doubles()
    model = model_of(block)
    first = chunk_forwards(model, modules="block", chunk_dim="batch")
    chunk_forwards(model, modules="block", chunk_dim="batch")
    with pytest.raises(RuntimeError) as caught:
        first.undo()
    assert_expected_inline(
        str(caught.value),
        """the forward of block was wrapped again after it was chunked; undo the later wrapper first""",
    )


def test_nested_outputs_are_joined():
    x = torch.arange(24.0).view(4, 3, 2)
    block = wrapped(Doubles(lambda x: (x, [x + 1, None, "name"], {"k": x[..., 0]})))
    whole, (more, none, name), named = block(x)
    assert torch.equal(whole, x)
    assert torch.equal(more, x + 1)
    assert (none, name) == (None, "name")
    assert torch.equal(named["k"], x[..., 0])


def test_nested_inputs_are_cut_with_their_samples():
    seen = []

    class Sees(nn.Module):
        def forward(self, x, pair, *, named):
            seen.append((pair, named))
            return x

    x, mask = torch.randn(4, 3, 2), torch.arange(4 * 3).view(4, 3)
    shared = torch.randn(7)
    wrapped(Sees())(x, (mask, 3), named={"m": [mask], "shared": shared})
    for chunk, (pair, named) in enumerate(seen):
        part = mask[2 * chunk : 2 * chunk + 2]
        assert torch.equal(pair[0], part)
        assert pair[1] == 3
        assert torch.equal(named["m"][0], part)
        assert named["shared"] is shared


def test_chunks_along_the_sequence_are_contiguous():
    contiguous = []
    block = wrapped(
        Doubles(lambda x: (contiguous.append(x.is_contiguous()), x.view(-1, 2).view(x.shape))[1]),
        chunk_dim="seq",
    )
    x = torch.randn(2, 4, 2, requires_grad=True)
    out = block(x)
    assert contiguous == [True, True]
    assert torch.equal(out, x)
    (gradient,) = torch.autograd.grad((out * out).sum(), x)
    torch.testing.assert_close(gradient, 2 * x)


def test_a_dtensor_is_cut_in_what_each_rank_holds(one_rank_group: str):
    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.randn(2, 4, 2), mesh, [Shard(1)]).requires_grad_()
    block = wrapped(Doubles(), chunk_dim="seq")
    out = block(x)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(1),)
    assert torch.equal(out.to_local(), 2 * x.to_local())
    (gradient,) = torch.autograd.grad(out.to_local().sum(), x)
    assert torch.equal(gradient.to_local(), torch.full((2, 4, 2), 2.0))


# ---- refusals ----------------------------------------------------------------------------------

LAYOUT = InputLayout(
    activation="x", arguments={"x": TokenDims(batch=0, seq=1), "extra": TokenDims(batch=0)}
)


def refusal(call) -> str:
    with pytest.raises(ForwardChunkingError) as caught:
        call()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_refuses_patterns_that_match_nothing():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Doubles()})})
    text = refusal(lambda: chunk_forwards(model, modules="layer.*", chunk_dim="batch"))
    assert_expected_inline(
        text,
        """\
layer.* cannot run in 2 chunks along batch:
  - no module of the model matches 'layer.*'; it has layers.0, layers""",
    )


def test_a_part_of_a_model_may_hold_none_of_the_modules():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Doubles()})})
    options = {"chunk_dim": "batch", "may_match_none": True}
    with chunk_forwards(model, modules="layers.*.moe", **options) as handle:
        assert handle.roots == ()
        assert "forward" not in vars(model.layers["0"])


def test_refuses_a_root_within_a_root():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Doubles()})})
    text = refusal(lambda: chunk_forwards(model, modules=("layers", "layers.*"), chunk_dim="batch"))
    assert_expected_inline(
        text,
        """\
layers and layers.* cannot run in 2 chunks along batch:
  - layers.0 lies within layers""",
    )


def test_refuses_another_number_of_chunks():
    text = refusal(
        lambda: chunk_forwards(
            model_of(Doubles()), modules="block", chunk_dim="batch", num_chunks=4
        )
    )
    assert_expected_inline(
        text,
        """\
block cannot run in 4 chunks along batch:
  - the eager producer makes 2 chunks; chunk the traced graph for others""",
    )


def test_refuses_a_forward_that_lacks_what_the_layout_names_and_leaves_it_alone():
    layout = InputLayout(activation="h", arguments={"h": TokenDims(), "mask": TokenDims()})
    block = Doubles()
    model = model_of(block)
    text = refusal(lambda: chunk_forwards(model, modules="block", chunk_dim="batch", layout=layout))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - the input layout has a rule for 'h', and the forward has no such argument
  - the input layout has a rule for 'mask', and the forward has no such argument
  its forward is (x, extra=None, *more, **named)""",
    )
    assert "forward" not in vars(block)


def test_refuses_odd_extents_and_one_sample():
    block = wrapped(Doubles(), layout=LAYOUT)
    assert_expected_inline(
        refusal(lambda: block(torch.zeros(3, 4, 2))),
        """\
block cannot run in 2 chunks along batch:
  - the activation's batch extent on this rank is 3, which does not divide into 2 equal chunks
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[3, 4, 2]""",
    )
    assert_expected_inline(
        refusal(lambda: block(torch.zeros(1, 4, 2))),
        """\
block cannot run in 2 chunks along batch:
  - the activation's batch extent on this rank is 1, which does not divide into 2 equal chunks
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[1, 4, 2]""",
    )


def test_refuses_all_arguments_that_do_not_fit_at_once():
    block = wrapped(Doubles(), layout=LAYOUT)
    text = refusal(lambda: block(torch.zeros(4, 4, 2), torch.zeros(1, 4), torch.zeros(2)))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - extra should have the activation's batch extent 4 in dim 0
  - more is a tensor, and the input layout has no rule for 'more'
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[4, 4, 2], extra: float32[1, 4], more: float32[2]""",
    )


def test_refuses_an_activation_that_is_no_tensor():
    block = wrapped(Doubles(), layout=LAYOUT)
    assert_expected_inline(
        refusal(lambda: block(None, torch.zeros(4, 4))),
        """\
block cannot run in 2 chunks along batch:
  - the activation 'x' is no tensor, or was not given
  its forward is (x, extra=None, *more, **named)
  it was called with x: NoneType, extra: float32[4, 4]""",
    )


def test_refuses_a_tensor_of_which_the_dimension_is_not_certain():
    block = wrapped(Doubles())
    text = refusal(lambda: block(torch.zeros(4, 3, 2), torch.zeros(4, 4)))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - extra has the extent 4 in dim 0 and 1, so it is not certain whether and where it holds the batch; give an input layout with a rule for 'extra'
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[4, 3, 2], extra: float32[4, 4]""",
    )
    text = refusal(lambda: block(torch.zeros(4, 3, 2), torch.zeros(3, 4)))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - extra has the extent 4 in dim 1, so it is not certain whether and where it holds the batch; give an input layout with a rule for 'extra'
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[4, 3, 2], extra: float32[3, 4]""",
    )


def test_refuses_a_tensor_with_the_same_extent_by_chance():
    """A scale of each of two heads is no scale of each of two samples."""

    class Scales(nn.Module):
        def forward(self, x, head_scale):
            return x * head_scale[:, None]

    text = refusal(lambda: wrapped(Scales())(torch.zeros(2, 3, 2, 4), torch.zeros(2)))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - head_scale has the extent 2 in dim 0, so it is not certain whether and where it holds the batch; give an input layout with a rule for 'head_scale'
  its forward is (x, head_scale)
  it was called with x: float32[2, 3, 2, 4], head_scale: float32[2]""",
    )


def test_refuses_a_tensor_that_may_hold_samples_and_tokens_flattened():
    text = refusal(lambda: wrapped(Doubles())(torch.zeros(4, 3, 2), torch.zeros(12, 7)))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - extra has the extent 12 in dim 0, so it is not certain whether and where it holds the batch; give an input layout with a rule for 'extra'
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[4, 3, 2], extra: float32[12, 7]""",
    )


def test_cuts_another_tensor_of_the_activation_s_shape():
    seen = []

    class Adds(nn.Module):
        def forward(self, x, residual):
            seen.append(residual.shape)
            return x + residual

    x = torch.randn(4, 4, 2)
    assert torch.equal(wrapped(Adds())(x, 2 * x), 3 * x)
    assert seen == [(2, 4, 2), (2, 4, 2)]


class Writes(nn.Module):
    """Adds what it got to a cache."""

    def forward(self, x, cache):
        cache.add_(x)
        return x + 1


@pytest.mark.parametrize("chunk_dim", ["batch", "seq"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_refuses_a_forward_that_writes_to_an_argument(chunk_dim: str, requires_grad: bool):
    """Along the sequence each chunk has a copy, of which the caller would see nothing."""
    block = wrapped(Writes(), chunk_dim=chunk_dim)
    x = torch.ones(2, 4, 5)
    cache = torch.zeros(2, 4, 5, requires_grad=requires_grad)
    text = refusal(lambda: block(x, cache.clone()))
    assert_expected_inline(
        text.replace(chunk_dim, "DIM"),
        """\
block cannot run in 2 chunks along DIM:
  - the forward writes to cache, of which each chunk has a part of its own; return what is written instead
  its forward is (x, cache)""",
    )


def test_an_error_of_the_forward_is_its_own():
    def fails(x):
        raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match=r"^of the model$"):
        wrapped(Doubles(fails))(torch.zeros(4, 3, 2))


def test_refuses_values_that_nothing_says_how_to_cut():
    block = wrapped(Doubles())
    text = refusal(lambda: block(torch.zeros(4, 3, 2), named=[object]))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - named[0] is a type, and nothing says how to cut one; give the input layout a slicer for the type
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[4, 3, 2], named[0]: type""",
    )


def test_refuses_outputs_that_stand_for_all_tokens():
    block = wrapped(Doubles(lambda x: (x, x.mean())))
    assert_expected_inline(
        refusal(lambda: block(torch.zeros(4, 3, 2))),
        """\
block cannot run in 2 chunks along batch:
  - output [1] of chunk 0 is float32[], which is not laid out as the activation, float32[2, 3, 2]: values that stand for all tokens, as auxiliary losses and routing statistics, cannot be joined from chunks; for others give an input layout with a rule for '[1]' in outputs
  its forward is (x, extra=None, *more, **named)""",
    )


BATCH_ONLY = InputLayout(activation="x", arguments={"x": TokenDims(batch=0)})


def test_refuses_outputs_of_the_chunk_s_extent_by_chance():
    """Counts of two experts are no rows of a chunk of two samples."""
    block = wrapped(Doubles(lambda x: (x, x.sum((0, 1))[:2])), layout=BATCH_ONLY)
    assert_expected_inline(
        refusal(lambda: block(torch.zeros(4, 3, 5))),
        """\
block cannot run in 2 chunks along batch:
  - output [1] of chunk 0 is float32[2], which is not laid out as the activation, float32[2, 3, 5]: values that stand for all tokens, as auxiliary losses and routing statistics, cannot be joined from chunks; for others give an input layout with a rule for '[1]' in outputs
  its forward is (x, extra=None, *more, **named)""",
    )


def test_joins_outputs_as_the_layout_says():
    x = torch.randn(4, 3, 5)
    rules = {"[1]": TokenDims(batch=0), "[2]": TokenDims(batch=1)}
    block = wrapped(
        Doubles(lambda x: (x, x.sum((1, 2)), x.sum(2).t())),
        layout=replace(BATCH_ONLY, outputs=rules),
    )
    same, of_sample, of_token = block(x)
    assert torch.equal(same, x)
    assert torch.equal(of_sample, x.sum((1, 2)))
    assert torch.equal(of_token, x.sum(2).t())


def test_refuses_rules_of_outputs_that_do_not_fit():
    rules = {"[0]": TokenDims(seq=1), "[1]": TokenDims(batch=1), "[7]": TokenDims(batch=0)}
    block = wrapped(Doubles(lambda x: (x, x[:, 0])), layout=replace(BATCH_ONLY, outputs=rules))
    assert_expected_inline(
        refusal(lambda: block(torch.zeros(4, 3, 5))),
        """\
block cannot run in 2 chunks along batch:
  - output [0] has no batch dimension by the input layout, so it has no join
  - output [1] of chunk 0 is float32[2, 5], and should have the activation's batch extent 2 in dim 1
  - the input layout has a rule for output [7], and there is none
  its forward is (x, extra=None, *more, **named)""",
    )


def test_a_layout_is_data():
    """It can be a key, travel to a worker, and be copied; it cannot be changed."""
    again = pickle.loads(pickle.dumps(LAYOUT))
    assert again == LAYOUT == copy.deepcopy(LAYOUT)
    assert hash(again) == hash(LAYOUT)
    assert again != BATCH_ONLY
    with pytest.raises(TypeError, match="does not support item assignment"):
        LAYOUT.arguments["more"] = TokenDims()


def test_refuses_outputs_that_differ_between_chunks():
    numbers = iter(range(2))
    block = wrapped(Doubles(lambda x: (x, next(numbers))))
    text = refusal(lambda: block(torch.zeros(4, 3, 2)))
    assert_expected_inline(
        text,
        """\
block cannot run in 2 chunks along batch:
  - output [1] is no tensor, and not the same in every chunk: 0, 1
  its forward is (x, extra=None, *more, **named)""",
    )


def test_refuses_a_dtensor_of_partial_sums(one_rank_group: str):
    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.zeros(4, 3, 2), mesh, [Partial()])
    assert_expected_inline(
        refusal(lambda: wrapped(Doubles())(x)),
        """\
block cannot run in 2 chunks along batch:
  - x is a DTensor placed as Partial(sum); only shards and replicas are cut
  its forward is (x, extra=None, *more, **named)
  it was called with x: float32[4, 3, 2] placed as (Partial(sum),)""",
    )


def test_takes_a_replicated_dtensor(one_rank_group: str):
    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.ones(4, 3, WIDTH), mesh, [Replicate()])
    out = wrapped(Doubles())(x)
    assert out.placements == (Replicate(),)
    assert torch.equal(out.to_local(), torch.full((4, 3, WIDTH), 2.0))
