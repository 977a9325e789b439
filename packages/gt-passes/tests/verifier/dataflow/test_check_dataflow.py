"""Which changes of order and views keep the dataflow of a graph, and what is said of those that do not."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from program_pairs import X, Y, aten, bucketed_gather, differences, gather, same


def test_can_reorder_what_does_not_depend_on_each_other():
    def before(x, y):
        a = x.exp()
        b = y.sin()
        return a + b

    def after(x, y):
        b = y.sin()
        a = x.exp()
        return a + b

    assert same(before, after, X, Y)


def test_can_recompute_share_and_drop_what_is_dead():
    def before(x, y):
        a = x.exp()
        return a * a, x.cos()

    def after(x, y):
        y.sin()
        return x.exp() * x.exp(), x.cos()

    assert same(before, after, X, Y)
    assert same(after, before, X, Y)


def test_can_spell_views_differently():
    def before(x, y):
        return x.t().t().view(2, 4, 4).permute(1, 0, 2).reshape(32) @ y.flatten()

    def after(x, y):
        return x.reshape(2, 4, 4).transpose(0, 1).contiguous().view(-1) @ y.view(4, 8).reshape(-1)

    assert same(before, after, X, Y)


def test_can_cut_and_join_along_any_dim():
    def before(x, y):
        return x.exp()

    def after(x, y):
        left, right = x[:, :1], x[:, 1:]
        return torch.cat([torch.cat([left, right], dim=1)[:3], x[3:]]).exp()

    assert same(before, after, X, Y)


def test_can_copy_to_another_device_and_back():
    def before(x, y):
        return x.exp() * y

    def after(x, y):
        kept = aten._to_copy.default(x.exp(), device=torch.device("cpu"))
        return torch.ops.prims.device_put.default(kept, torch.device("cpu")) * y

    assert same(before, after, X, Y)


def test_can_cast_before_cutting_or_after_it():
    def before(x, y):
        return torch.cat([x.flatten().bfloat16(), y.flatten().bfloat16()]) * 2

    def after(x, y):
        return torch.cat([x.flatten(), y.flatten()]).bfloat16() * 2

    assert same(before, after, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x, y: x.view(4, 8).t(), id="another-order-of-elements"),
        pytest.param(lambda x, y: y.t().reshape(8, 4), id="another-input"),
        pytest.param(lambda x, y: x.t().reshape(8, 4) * 1.5, id="another-operator"),
        pytest.param(lambda x, y: x.t().bfloat16().float().reshape(8, 4), id="rounded"),
        pytest.param(lambda x, y: x.t()[:1].expand(4, 8).reshape(8, 4), id="repeated"),
    ],
)
def test_cannot_change_elements(after):
    assert not same(lambda x, y: x.t().reshape(8, 4), after, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x, y: (y - x) * 2.0, id="swapped-operands"),
        pytest.param(lambda x, y: (x - y) * 2.5, id="another-constant"),
        pytest.param(lambda x, y: torch.sub(x, y, alpha=2) * 2.0, id="another-keyword"),
        pytest.param(lambda x, y: (x - y) * 2, id="another-type-of-constant"),
        pytest.param(lambda x, y: x - y, id="dropped"),
        pytest.param(lambda x, y: (x - y) * 2.0 * 2.0, id="doubled"),
    ],
)
def test_cannot_change_operators_or_their_arguments(after):
    assert not same(lambda x, y: (x - y) * 2.0, after, X, Y)


def test_cannot_swap_outputs():
    assert not same(lambda x, y: (x.exp(), y.exp()), lambda x, y: (y.exp(), x.exp()), X, Y)


def test_errors_name_the_first_values_that_differ():
    def before(x, y):
        a = x.exp().sin()
        return a @ y.t(), a

    def after(x, y):
        a = x.exp().cos()
        return a @ y.t(), a

    def swapped(x, y):
        return y.exp().sin() @ x.t(), y.exp().sin()

    assert_expected_inline(
        "\n".join(map(str, differences(before, after, X, Y))),
        """\
[dataflow] node cos
output 0 (mm) is not computed as before
expected aten.sin.default(exp), as in node sin
got      aten.cos.default(exp), as in node cos""",
    )
    assert_expected_inline(
        "\n".join(map(str, differences(lambda x, y: x - y, lambda x, y: y - x, X, Y))),
        """\
[dataflow] node sub
output 0 (sub) is not computed as before
expected aten.sub.Tensor(x_1, y_1), as in node sub
got      aten.sub.Tensor(y_1, x_1), as in node sub""",
    )


def test_errors_name_the_part_of_a_bucket():
    def before(x, y):
        return gather(x), gather(y)

    def after(x, y):
        return tuple(bucketed_gather([y, x]))

    assert_expected_inline(
        "\n".join(map(str, differences(before, after, X, Y))),
        """\
[dataflow] node getitem
output 0 (_unsafe_view) is not computed as before
expected all_gather(4, fsdp, x_1), as in node all_gather_into_tensor
got      all_gather(4, fsdp, y_1), as in node getitem
[dataflow] node getitem_1
output 1 (_unsafe_view_1) is not computed as before
expected all_gather(4, fsdp, y_1), as in node all_gather_into_tensor_1
got      all_gather(4, fsdp, x_1), as in node getitem_1""",
    )


def test_errors_name_what_is_left_in_an_input():
    def before(x, y):
        x.add_(y)
        return y.exp()

    assert_expected_inline(
        "\n".join(map(str, differences(before, lambda x, y: y.exp(), X, Y))),
        """\
[dataflow] node x_1
what is left in input x_1 is not computed as before
expected aten.add_.Tensor(x_1, y_1) of shape [8, 4], as in node add_
got      the input x_1 of shape [8, 4], as in node x_1""",
    )
