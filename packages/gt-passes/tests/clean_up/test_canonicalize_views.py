"""Which views and copies CanonicalizeViews folds and composes, and which it must not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, node_of, program, run_pass, same_bits
from torch.fx.experimental.proxy_tensor import make_fx

from gt_config import CompileConfig
from gt_config.node_keys import ChunkAnnotation
from gt_passes import CanonicalizeViews, PassContext, PassManager, optimize
from gt_trace import trace_step
from gt_trace.node_metadata import write_annotation

aten = torch.ops.aten
X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


def canonical(fn: Callable[..., object], *args: torch.Tensor) -> str:
    """The program after the pass; asserts that it computes the same bits and stays as it is."""
    graph_module = capture(fn, *(argument.clone() for argument in args))
    reference = copy.deepcopy(graph_module)
    run_pass(CanonicalizeViews(), graph_module)
    text = program(graph_module)
    ours, theirs = ([argument.clone() for argument in args] for _ in range(2))
    assert same_bits(graph_module(*ours), reference(*theirs))
    assert same_bits(ours, theirs)
    assert not run_pass(CanonicalizeViews(), graph_module).changed
    assert program(graph_module) == text
    return text


NOTHING_LEFT = """\
cos = aten.cos.default(x_1)
return cos
"""


@pytest.mark.parametrize(
    "change_nothing",
    [
        lambda x: x.detach(),
        lambda x: aten.alias(x),
        lambda x: aten.view(x, [2, 3, 4]),
        lambda x: aten.view(x, [6, -1]).view(2, 3, 4),
        lambda x: aten._unsafe_view(x, [2, 3, 4]),
        lambda x: aten.expand(x, [-1, 3, 4]),
        lambda x: aten.permute(x, [0, 1, 2]),
        lambda x: aten.slice(x, 1, 0, 9223372036854775807),
        lambda x: aten.transpose(aten.transpose(x, 0, 1), 0, 1),
        lambda x: aten.permute(aten.permute(x, [2, 0, 1]), [1, 2, 0]),
        lambda x: aten.squeeze(aten.unsqueeze(x, 1), 1),
        lambda x: aten.squeeze(x, 0),
        lambda x: aten._to_copy(x, dtype=torch.float32),
        lambda x: aten.clone(x),
        lambda x: aten.clone(x, memory_format=torch.contiguous_format),
        lambda x: aten.clone(aten.detach(aten.view(x.detach(), [24]))).view(2, 3, 4),
    ],
)
def test_can_fold_what_changes_nothing(change_nothing):
    assert canonical(lambda x: change_nothing(x).cos(), X) == NOTHING_LEFT


@pytest.mark.parametrize(
    "unfollowed",
    [
        lambda x: x.as_strided((2, 3, 4), (12, 4, 1)),
        lambda x: x.as_strided((24,), (1,)).view(2, 3, 4),
        lambda x: x.as_strided((4, 3), (6, 2), 1).as_strided((2, 3, 4), (12, 4, 1), 0),
        lambda x: x[1:].as_strided((1, 3, 4), (12, 4, 1)),
        lambda x: aten._reshape_alias(x, [2, 3, 4], [12, 4, 1]),
        lambda x: x.view(torch.float64).view(torch.float32),
        lambda x: x.view(torch.int16).view(torch.float32),
        lambda x: x.unfold(2, 1, 1).squeeze(-1),
        lambda x: x.view(1, 1, 24).diagonal(0, 0, 1).t().view(2, 3, 4),
        lambda x: aten.lift(x),
    ],
)
def test_keeps_views_that_the_verifier_does_not_follow(unfollowed):
    """The pass manager refuses what the verifier cannot confirm."""
    assert "aten.cos.default(x_1)" not in canonical(lambda x: unfollowed(x).cos(), X)


def test_can_run_on_a_backward_through_nested_strided_views():
    def step(x):
        viewed = x.cos().view(24).as_strided((4, 3), (6, 2), 1).view(12)
        loss = viewed.as_strided((3, 4), (2, 6), 1).exp().sum()
        return torch.autograd.grad(loss, x)

    canonical(step, X.clone().requires_grad_())


@pytest.mark.parametrize(
    "change_nothing",
    [
        lambda x: x.view(2, 3, 4),
        lambda x: x.view(24).view(2, 3, 4),
        lambda x: x.reshape(6, 4).detach().view(2, 3, 4),
        lambda x: aten.clone(x.view(24)).view(2, 3, 4),
    ],
)
def test_can_fold_views_of_memory_that_is_read_by_strides(change_nothing):
    text = canonical(lambda x: change_nothing(x.cos()).as_strided((2, 4), (1, 1)).exp(), X)
    assert "as_strided.default(cos, [2, 4], [1, 1])" in text


def test_can_compose_reshapes_of_a_contiguous_tensor():
    assert_expected_inline(
        canonical(lambda x: x.cos().view(6, 4).view(4, 6).view(3, 8), X),
        """\
cos = aten.cos.default(x_1)
view_2 = aten.view.default(cos, [3, 8])
return view_2
""",
    )


def test_can_compose_permutations_that_only_each_other_use():
    assert_expected_inline(
        canonical(lambda x: x.permute(2, 0, 1).transpose(0, 1).cos(), X),
        """\
transpose = aten.permute.default(x_1, [0, 2, 1])
cos = aten.cos.default(transpose)
return cos
""",
    )


def test_can_spell_an_unsafe_view_as_the_view_that_it_is():
    assert_expected_inline(
        canonical(lambda x: aten._unsafe_view(x, [6, 4]).cos(), X),
        """\
_unsafe_view = aten.view.default(x_1, [6, 4])
cos = aten.cos.default(_unsafe_view)
return cos
""",
    )


def test_cannot_compose_permutations_that_others_use():
    def step(x):
        inner = x.permute(2, 0, 1)
        return inner.transpose(0, 1).cos(), inner.cos()

    assert "aten.permute.default(x_1, [2, 0, 1])" in canonical(step, X)


def test_cannot_compose_reshapes_of_a_strided_tensor():
    def step(x):
        return x.transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4).cos()

    assert canonical(step, X).count("aten.view.default") == 0  # equal to the transposed tensor

    def merge(x):
        return x.transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 2, 2, 1).cos()

    assert canonical(merge, X).count("aten.view.default") == 2


def test_cannot_fold_a_cast_to_another_dtype():
    assert "_to_copy" in canonical(lambda x: x.to(torch.bfloat16).cos(), X)


def test_cannot_fold_a_copy_into_other_strides():
    assert "clone" in canonical(lambda x: x.transpose(0, 1).contiguous().cos(), X)


def test_cannot_fold_a_conjugation():
    text = canonical(lambda x: aten._conj(x).cos(), torch.view_as_complex(torch.ones(3, 2)))
    assert "_conj" in text


def refusals(fn: Callable[..., object], *args: torch.Tensor) -> str:
    """What the pass refuses; asserts that the graph still computes the same bits."""
    canonical(fn, *args)
    graph_module = capture(fn, *(argument.clone() for argument in args))
    return "\n".join(map(str, run_pass(CanonicalizeViews(), graph_module).refusals))


def test_cannot_fold_a_copy_whose_source_is_written_to():
    def step(x):
        before = x.clone()
        x.add_(1)
        return before.cos()

    assert_expected_inline(
        refusals(step, X),
        """clone: the memory of this copy or of its source x_1 is written to""",
    )


def test_cannot_fold_a_copy_whose_source_is_written_to_through_a_view():
    def step(x):
        before = x.clone()
        x.view(24)[2:].mul_(2)
        return before.cos()

    assert "clone: the memory" in refusals(step, X)


def test_cannot_fold_a_copy_that_is_written_to():
    def step(x):
        scratch = x.clone()
        scratch.add_(1)
        return scratch.cos(), x.cos()

    assert "clone: the memory" in refusals(step, X)


def test_cannot_make_an_output_of_an_input():
    assert_expected_inline(
        refusals(lambda x: (aten.alias(x), x.cos()), X),
        """alias: it is an output of its own, and x_1 is one or an input""",
    )
    assert_expected_inline(
        refusals(lambda x: (x.clone(), x.cos()), X),
        """clone: an output would share the memory of an input""",
    )


def test_cannot_make_two_outputs_one():
    def step(x):
        loss = x.sum()
        return loss, aten.alias(loss)

    assert_expected_inline(
        refusals(step, X),
        """alias: it is an output of its own, and sum_1 is one or an input""",
    )

    def copied(x):
        loss = x.sum()
        return loss, loss.clone()

    assert_expected_inline(refusals(copied, X), """clone: two outputs would share their memory""")


def test_can_return_a_tensor_in_place_of_its_alias():
    assert_expected_inline(
        canonical(lambda x: x.cos().detach(), X),
        """\
cos = aten.cos.default(x_1)
return cos
""",
    )


def test_cannot_fold_a_copy_that_frees_a_larger_tensor():
    def step(x):
        large = x.cos()
        return large[:1].clone().sin()

    assert_expected_inline(
        refusals(step, X), """clone: its source slice_1 is part of a larger storage"""
    )


def test_cannot_touch_a_tensor_whose_shape_is_changed_in_place():
    def step(x):
        y = x.cos()
        z = aten.alias(y)
        aten.unsqueeze_(z, 0)
        return y.sin(), z.sin()

    assert_expected_inline(
        refusals(step, X),
        """alias: an operator changes the shape of a tensor that shares its memory""",
    )


def test_cannot_fold_the_boundary_of_a_chunk():
    graph_module = capture(lambda x: aten.alias(x.cos()).sin(), X)
    boundary = ChunkAnnotation(
        region_root="layers.0", role="split_boundary", direction="forward", producer="eager"
    )
    write_annotation(node_of(graph_module, "alias"), boundary)
    report = run_pass(CanonicalizeViews(), graph_module)
    assert not report.changed
    assert_expected_inline(
        "\n".join(map(str, report.refusals)), """alias: it is the boundary of a chunk"""
    )


def test_a_graph_without_views_stays_as_it_is():
    graph_module = capture(lambda x: x.cos().sin(), X)
    before = program(graph_module)
    report = run_pass(CanonicalizeViews(), graph_module)
    assert not report.changed
    assert report.counts == {}
    assert program(graph_module) == before


def test_folds_views_to_symbolic_sizes_and_drops_the_sizes():
    def step(x):
        rows, columns = x.shape
        return x.view(-1).view(rows, columns).cos()

    graph_module = make_fx(step, tracing_mode="symbolic")(torch.ones(5, 7))
    context = PassContext.from_graph(graph_module)
    PassManager([CanonicalizeViews()], context=context).run(graph_module)
    assert program(graph_module) == NOTHING_LEFT
    x = torch.rand(3, 2)
    assert same_bits(graph_module(x), x.cos())


def test_long_chains_fold_from_the_front():
    def step(x):
        for _ in range(100):
            x = x.transpose(0, 1).detach()
        return x.cos()

    assert canonical(step, X) == NOTHING_LEFT


def test_keeps_a_part_of_an_expanded_input_that_is_expanded_again():
    def step(x):
        return x[:1].expand(x.shape).sin()

    x = X[:1].expand(3, 3, 4)
    traced = trace_step(step)(x)
    optimize(traced, CompileConfig(memory_policy="save_all"))  # which verifies
    assert torch.equal(traced.bind()(x), step(x))
