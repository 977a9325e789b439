"""When quantizing and then gathering is gathering and then quantizing, and when it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pass_graphs import capture, collectives
from torch.distributed.device_mesh import init_device_mesh

from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.verifier.collective_order import (
    CollectiveDifference,
    CollectiveSequence,
    compare_collective_sequences,
    note_exchanges,
)
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable
from gt_trace.testing import fake_world

RANKS = 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X = torch.ones(2, 4, dtype=torch.bfloat16)
Y = torch.ones(2, 4, dtype=torch.bfloat16)


def gather(x, group="fsdp"):
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, RANKS, group))


def reduce(x, reduction="max", group="fsdp"):
    return collectives.wait_tensor(collectives.all_reduce(x, reduction, group))


def scale_of(amax, dtype=E4M3, floor=1e-12):
    return (amax.double().clamp(min=floor).reciprocal() * torch.finfo(dtype).max).float()


def cast(x, scale, dtype=E4M3, bound=None):
    bound = torch.finfo(dtype).max if bound is None else bound
    return (x.float() * scale).clamp(-bound, bound).to(dtype)


def gather_bytes(quantized, group="fsdp"):
    return gather(quantized.view(torch.uint8), group).view(quantized.dtype)


def quantized_after(x, y):
    """Gathered, then quantized, transposed as a linear layer has it."""
    whole = gather(x).t()
    return cast(whole, scale_of(whole.abs().max()))


def quantized_before(x, y):
    return gather_bytes(cast(x, scale_of(reduce(x.abs().max())))).t()


def differs(before: Callable[..., object], after: Callable[..., object], *args: object) -> bool:
    table = ValueTable()
    args = args or (X, Y)
    first, second = (Dataflow.of(capture(each, *args), table=table) for each in (before, after))
    return bool(list(first.find_differences(second)))


def test_what_is_quantized_may_be_gathered_instead():
    assert not differs(quantized_after, quantized_before)
    assert not differs(quantized_before, quantized_after)


def test_backends_that_know_float8_need_no_bytes():
    def before(x, y):
        return gather(cast(x, scale_of(reduce(x.abs().max())))).t()

    assert not differs(quantized_after, before)


def test_what_is_in_float32_is_not_cast_to_it():
    assert not differs(quantized_after, quantized_before, X.float(), Y.float())


def power_of_two(scale):
    return torch.exp2(torch.floor(torch.log2(scale)))


def test_a_scale_may_be_a_power_of_two():
    def before(x, y):
        whole = gather(x)
        return cast(whole, power_of_two(scale_of(whole.abs().max())))

    def after(x, y):
        return gather_bytes(cast(x, power_of_two(scale_of(largest(x, y)))))

    def rounded_up(x, y):
        scale = torch.exp2(torch.ceil(torch.log2(scale_of(largest(x, y)))))
        return gather_bytes(cast(x, scale))

    assert not differs(before, after)
    assert differs(before, rounded_up)


@pytest.mark.parametrize("operator", [torch.exp, torch.log, torch.rsqrt])
def test_no_other_approximation_makes_a_scale_common(operator):
    def before(x, y):
        whole = gather(x)
        return cast(whole, operator(whole.abs().max().float()))

    def after(x, y):
        return gather_bytes(cast(x, operator(largest(x, y).float())))

    assert differs(before, after)


def test_a_shard_may_be_cast_or_in_parts():
    def before(x, y):
        whole = gather(torch.cat([x, y]).to(torch.bfloat16))
        return cast(whole, scale_of(whole.abs().max()))

    def after(x, y):
        shard = torch.cat([x, y]).to(torch.bfloat16)
        return gather_bytes(cast(shard, scale_of(reduce(shard.abs().max()))))

    assert not differs(before, after, X.float(), Y.float())


def test_maxima_may_be_reduced_in_one_bucket_and_over_further_axes():
    with fake_world(rank=0, world_size=8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = (mesh.get_group(name).group_name for name in ("fsdp", "tp"))

        def before(x, y):
            wholes = [gather(x, fsdp).t(), gather(y, fsdp).t()]
            return [cast(w, scale_of(reduce(w.abs().max().double(), group=tp))) for w in wholes]

        def after(x, y):
            maxima = [x.abs().max(), y.abs().max()]
            packed = PACK_BUCKET(maxima, 1, torch.bfloat16)
            scales = scale_of(reduce(reduce(packed, group=fsdp).double(), group=tp))
            each = UNPACK_BUCKET(scales, 1, [1, 1])
            shards = [cast(s, m.view([])) for s, m in zip((x, y), each, strict=True)]
            packed = PACK_BUCKET([s.view(torch.uint8) for s in shards], 1, torch.uint8)
            parts = UNPACK_BUCKET(gather(packed, fsdp), RANKS, [8, 8])
            return [part.view(8, 4).view(E4M3).t() for part in parts]

        assert not differs(before, after)


def test_a_maximum_over_ranks_that_are_no_axis_of_the_mesh_makes_no_scale_common():
    """Ranks 1 and 3 gather, 0 to 2 and 3 to 5 reduce: to rank 3 come others than to rank 1."""

    def scale(x, over):
        return scale_of(reduce(reduce(x.abs().max(), group=over[0]), group=over[1]))

    with fake_world(rank=0, world_size=8):
        names = [dist.new_group(ranks).group_name for ranks in ([0, 2], [0, 1, 2])]
        assert differs(
            lambda x, y: cast(gather(x, names[0]), scale(x, names)),
            lambda x, y: gather_bytes(cast(x, scale(x, names)), names[0]),
        )


@pytest.mark.parametrize(
    "other",
    [
        lambda x, s: cast(x, s * 2),
        lambda x, s: cast(x, s.clamp(max=1.0)),
        lambda x, s: cast(x, s.bfloat16()),
        lambda x, s: (x.float() * s).to(E4M3),
    ],
)
def test_another_scale_or_cast_on_one_rank_is_found(other):
    """Constants are a rank's own, and each graph is right for itself."""

    def rank(quantize):
        return (
            lambda x, y: quantize(gather(x), scale_of(largest(x, y))),
            lambda x, y: gather_bytes(quantize(x, scale_of(largest(x, y)))),
        )

    (difference,) = differences_of_ranks(rank(cast), rank(other))
    assert difference.position == 1
    assert ", exchange 0 quantized by " in difference.calls[0].text
    assert differences_of_ranks(rank(other), rank(other)) == ()


def in_buckets(maxima, gathered):
    """Both shards quantized and gathered, in buckets with members in these orders."""

    def function(x, y):
        shards = [x, y]
        packed = PACK_BUCKET([shards[i].abs().max() for i in maxima], 1, torch.bfloat16)
        unpacked = UNPACK_BUCKET(scale_of(reduce(packed)), 1, [1, 1])
        scales = {i: unpacked[k].view([]) for k, i in enumerate(maxima)}
        packed = [cast(shards[i], scales[i]).view(torch.uint8) for i in gathered]
        parts = UNPACK_BUCKET(gather(PACK_BUCKET(packed, 1, torch.uint8)), RANKS, [8, 8])
        wholes = {i: parts[k].view(8, 4).view(E4M3) for k, i in enumerate(gathered)}
        return wholes[0], wholes[1]

    return function


def differences_of_ranks(*ranks) -> tuple[CollectiveDifference, ...]:
    """Where ranks differ of which each was captured so and made another such graph by passes."""
    sequences = {}
    for rank, (before, after) in enumerate(ranks):
        table = ValueTable()
        graph_module = capture(after, X, Y)
        first = Dataflow.of(capture(before, X, Y), table=table)
        second = Dataflow.of(graph_module, table=table)
        assert not list(first.find_differences(second))
        note_exchanges(second.exchanges)
        sequences[rank] = CollectiveSequence.of(graph_module)
    return compare_collective_sequences(sequences)


@pytest.mark.parametrize(
    ("maxima", "gathered", "position"), [((1, 0), (0, 1), 0), ((0, 1), (1, 0), 1)]
)
def test_buckets_in_another_order_on_one_rank_are_found(maxima, gathered, position):
    """For itself each rank is right: what it packs elsewhere, it takes elsewhere."""

    def captured(x, y):
        return tuple(cast(w, scale_of(w.abs().max())) for w in (gather(x), gather(y)))

    right, permuted = in_buckets((0, 1), (0, 1)), in_buckets(maxima, gathered)
    assert differences_of_ranks((captured, right), (captured, right)) == ()
    (difference,) = differences_of_ranks((captured, right), (captured, permuted))
    assert difference.position == position
    mine, theirs = difference.calls
    assert mine.text.split(", exchange ")[0] == theirs.text.split(", exchange ")[0]


def with_scale(scale):
    """The shard cast with what a function makes of both shards, then gathered."""
    return lambda x, y: gather_bytes(cast(x, scale(x, y))).t()


def largest(x, y):
    return reduce(x.abs().max())


MUTATIONS = {
    "a constant scale": with_scale(lambda x, y: torch.full((), 2.0)),
    "a scale by another constant": with_scale(lambda x, y: scale_of(largest(x, y), floor=1e-6)),
    "the scale of another dtype": with_scale(lambda x, y: scale_of(largest(x, y), dtype=E5M2)),
    "the scale of the shard alone": with_scale(lambda x, y: scale_of(x.abs().max())),
    "the maximum of another parameter": with_scale(lambda x, y: scale_of(largest(y, x))),
    "a maximum without magnitudes": with_scale(lambda x, y: scale_of(reduce(x.max()))),
    "a maximum of a part": with_scale(lambda x, y: scale_of(reduce(x[:1].abs().max()))),
    "a maximum of more than it": with_scale(
        lambda x, y: scale_of(reduce(torch.cat([x, y]).abs().max()))
    ),
    "the largest row's sum": with_scale(lambda x, y: scale_of(reduce(x.abs().sum(0).max()))),
    "a minimum of magnitudes": with_scale(lambda x, y: scale_of(reduce(x.abs().min()))),
    "the sum of maxima": with_scale(lambda x, y: scale_of(reduce(x.abs().max(), "sum"))),
    "the average of maxima": with_scale(lambda x, y: scale_of(reduce(x.abs().max(), "avg"))),
    "the least of maxima": with_scale(lambda x, y: scale_of(reduce(x.abs().max(), "min"))),
    "maxima of another group": with_scale(lambda x, y: scale_of(reduce(x.abs().max(), group="tp"))),
    "one maximum for each row": with_scale(lambda x, y: scale_of(reduce(x.abs().amax(1, True)))),
    "one maximum for each column": with_scale(lambda x, y: scale_of(reduce(x.abs().amax(0, True)))),
    "gathered over another group": lambda x, y: gather_bytes(
        cast(x, scale_of(largest(x, y))), "tp"
    ).t(),
    "another parameter": lambda x, y: gather_bytes(cast(y, scale_of(largest(x, y)))).t(),
    "cast to another dtype": lambda x, y: (
        gather_bytes(cast(x, scale_of(largest(x, y)), E5M2, 448.0)).view(E4M3).t()
    ),
    "clamped elsewhere": lambda x, y: gather_bytes(
        cast(x, scale_of(largest(x, y)), bound=400.0)
    ).t(),
    "cast twice": lambda x, y: gather_bytes(
        (x.float() * scale_of(largest(x, y))).clamp(-448, 448).bfloat16().to(E4M3)
    ).t(),
    "rounded before it is scaled": lambda x, y: gather_bytes(
        (x.half().float() * scale_of(largest(x, y))).clamp(-448, 448).to(E4M3)
    ).t(),
    "divided by the scale": lambda x, y: gather_bytes(
        (x.float() / scale_of(largest(x, y))).clamp(-448, 448).to(E4M3)
    ).t(),
    "gathered along another dim": lambda x, y: gather_bytes(
        cast(x, scale_of(largest(x, y))).t().contiguous()
    ).view(4, 8),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_anything_else_is_not_the_same(name: str):
    assert differs(quantized_after, MUTATIONS[name])
    assert differs(MUTATIONS[name], quantized_after)


def test_one_element_scaled_in_float64_is_not_one_of_those_scaled_in_float32():
    """Only without dims does a number in float64 have its dtype decide that of the product."""

    def scale(x):
        return reduce(x.abs().max()).double().clamp(min=1e-12).reciprocal() * 448

    def before(x, y):
        return cast(gather(x)[0, 0], scale(x))

    def after(x, y):
        return gather_bytes(cast(x, scale(x)))[0, 0]

    assert differs(before, after)
    assert differs(after, before)


def test_bytes_taken_as_another_dtype_are_not_the_same():
    def after(x, y):
        return quantized_before(x, y).view(E5M2)

    def before(x, y):
        return quantized_after(x, y).to(E5M2)

    assert differs(before, after)


def test_the_shards_own_scale_is_not_made_common_by_gathering_what_it_scaled():
    """Each rank scales its own part otherwise: one scale for all of them is another result."""

    def before(x, y):
        return cast(gather(x), scale_of(x.abs().max()))

    def after(x, y):
        return gather_bytes(cast(x, scale_of(x.abs().max())))

    assert differs(before, after)


@pytest.mark.parametrize("reduced", [("max", "tp"), ("sum", "fsdp")])
def test_only_a_maximum_over_the_gatherings_own_group_makes_a_scale_common(reduced):
    def before(x, y):
        return cast(gather(x), scale_of(reduce(x.abs().max(), *reduced)))

    def after(x, y):
        return gather_bytes(cast(x, scale_of(reduce(x.abs().max(), *reduced))))

    assert differs(before, after)


def test_a_scale_that_each_rank_changes_by_its_own_data_is_not_common():
    def before(x, y):
        return cast(gather(x), scale_of(largest(x, y)) * y.float().mean())

    def after(x, y):
        return gather_bytes(cast(x, scale_of(largest(x, y)) * y.float().mean()))

    assert differs(before, after)


def of_padded_shards(*, rows, kept=7, padding=torch.zeros):
    """Of ranks with two rows each of so many, ``rows`` of which are this rank's own and no padding.

    Returns:
        What gathers and then quantizes all but the padding, and what quantizes first.
    """

    def shard(x):
        return torch.cat(
            [x[:rows], x.new_zeros([2 - rows, 4]) if padding is torch.zeros else padding(x)[rows:]]
        )

    def before(x, y):
        whole = gather(shard(x), group)[:kept].t()
        return cast(whole, scale_of(whole.abs().max()))

    def after(x, y):
        part = shard(x)
        return gather_bytes(cast(part, scale_of(reduce(part.abs().max(), group=group))), group)[
            :kept
        ].t()

    group = dist.group.WORLD.group_name
    return before, after


@pytest.mark.parametrize(("rank", "rows"), [(0, 2), (2, 2), (3, 1)])
def test_padding_by_zeros_is_none_of_the_largest_magnitudes(rank, rows):
    with fake_world(rank=rank, world_size=RANKS):
        before, after = of_padded_shards(rows=rows)
        assert not differs(before, after)


def test_so_is_that_of_a_rank_without_elements():
    with fake_world(rank=3, world_size=RANKS):
        before, after = of_padded_shards(rows=0, kept=5)
        assert not differs(before, after)


@pytest.mark.parametrize(
    ("rows", "kept", "padding"),
    [
        (2, 7, torch.zeros),  # its last row is cut off, and no padding
        (1, 6, torch.zeros),  # and so is its only one
        (1, 7, torch.ones_like),
        (1, 7, torch.abs),
    ],
)
def test_what_is_cut_off_and_may_be_no_zero_may_be_larger(rows, kept, padding):
    with fake_world(rank=3, world_size=RANKS):
        before, after = of_padded_shards(rows=rows, kept=kept, padding=padding)
        assert differs(before, after)


def test_nothing_is_said_of_padding_where_this_ranks_part_is_unknown():
    def before(x, y):
        whole = gather(x)[:7]
        return cast(whole, scale_of(whole.abs().max()))

    def after(x, y):
        return gather_bytes(cast(x, scale_of(largest(x, y))))[:7]

    assert differs(before, after)


def test_ranks_that_take_different_elements_for_padding_are_found():
    """The last rank of the second pair would have one row more, which the first takes for zeros."""
    with fake_world(rank=0, world_size=RANKS):
        seven, five = of_padded_shards(rows=2), of_padded_shards(rows=2, kept=5)
        assert differences_of_ranks(seven, seven) == ()
        (difference, *_) = differences_of_ranks(seven, five)
        assert difference.position == 0
        assert ", exchange 0 of the first 28 gathered" in difference.calls[0].text
        assert ", exchange 0 of the first 20 gathered" in difference.calls[1].text


@pytest.mark.parametrize("operator", [torch.abs, torch.exp, lambda x: x * 3, lambda x: x.half()])
def test_no_other_operator_is_moved_past_a_gathering(operator):
    assert differs(lambda x, y: operator(gather(x)), lambda x, y: gather(operator(x)))


def test_a_maximum_along_a_dim_is_not_that_of_all():
    assert differs(lambda x, y: x.max(), lambda x, y: x.max(dim=0).values.max(dim=0).values)


def test_a_maximum_is_that_of_the_same_elements_in_whichever_order():
    assert not differs(lambda x, y: x.max(), lambda x, y: x.t().max())
    assert differs(lambda x, y: x.max(), lambda x, y: x[:, :2].max())
    assert differs(lambda x, y: x.max(), lambda x, y: y.max())
