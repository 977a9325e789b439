"""Which parameters QuantizeBeforeGather gathers in 8 bits, by which scales, and which it leaves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from fsdp_graphs import gathered
from pass_graphs import capture, collectives, program, run_pass, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from gt_config.node_keys import FsdpCollectiveAnnotation, ModuleAnnotation
from gt_passes import BucketAllGathers, PassReport, ReshardAfterForward
from gt_passes.analysis.collectives import collective_bytes, is_collective
from gt_passes.fsdp.quantize_before_gather import QuantizeBeforeGather
from gt_trace import collective_counts
from gt_trace.annotate import annotate, phase
from gt_trace.node_metadata import phase_of, read_annotation
from gt_trace.testing import fake_world

E4M3 = torch.float8_e4m3fn
A = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
B = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


def scale_of(amax):
    return (amax.double().clamp(min=1e-12).reciprocal() * 448).float()


def cast(x, scale):
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3)


def linear(x, weight):
    """A product whose weight is rounded to float8, as linear layers in float8 have it."""
    transposed = weight.t()
    scale = scale_of(transposed.abs().max())
    return x @ (cast(transposed, scale).float() / scale)


def weight(shard, name, **options):
    return gathered(shard, name, dtype=torch.bfloat16, **options)


def block(a, b, x):
    return linear(x, weight(a, "layers.0.a")), linear(x, weight(b, "layers.0.b"))


def run(function, *, first=()) -> tuple[GraphModule, PassReport]:
    graph_module = capture(function, A, B, X)
    for each in first:
        run_pass(each, graph_module)
    return graph_module, run_pass(QuantizeBeforeGather(), graph_module)


def test_quantizes_the_shards_of_a_block_by_maxima_that_are_reduced_at_once():
    graph_module, report = run(block)
    assert_expected_inline(
        program(graph_module),
        """\
_to_copy = aten._to_copy.default(a_1, dtype=torch.bfloat16)
_to_copy_6 = aten._to_copy.default(b_1, dtype=torch.bfloat16)
abs_default = aten.abs.default(_to_copy)
max_default = aten.max.default(abs_default)
abs_default_1 = aten.abs.default(_to_copy_6)
max_default_1 = aten.max.default(abs_default_1)
pack_bucket_default = gt_passes.pack_bucket.default([max_default, max_default_1], 1, torch.bfloat16)
all_reduce_default = _c10d_functional.all_reduce.default(pack_bucket_default, max, fsdp)
wait_tensor_default = _c10d_functional.wait_tensor.default(all_reduce_default)
_to_copy_default = aten._to_copy.default(wait_tensor_default, dtype=torch.float64)
clamp_default = aten.clamp.default(_to_copy_default, 1e-12)
reciprocal_default = aten.reciprocal.default(clamp_default)
mul_tensor = aten.mul.Tensor(reciprocal_default, 448)
_to_copy_default_1 = aten._to_copy.default(mul_tensor, dtype=torch.float32)
unpack_bucket_default = gt_passes.unpack_bucket.default(_to_copy_default_1, 1, [1, 1])
getitem = getitem(unpack_bucket_default, 0)
view_default = aten.view.default(getitem, [])
getitem_1 = getitem(unpack_bucket_default, 1)
view_default_1 = aten.view.default(getitem_1, [])
_to_copy_default_2 = aten._to_copy.default(_to_copy, dtype=torch.float32)
mul_tensor_1 = aten.mul.Tensor(_to_copy_default_2, view_default)
clamp_default_1 = aten.clamp.default(mul_tensor_1, -448.0, 448.0)
_to_copy_default_3 = aten._to_copy.default(clamp_default_1, dtype=torch.float8_e4m3fn)
view_dtype = aten.view.dtype(_to_copy_default_3, torch.uint8)
all_gather_into_tensor_default = _c10d_functional.all_gather_into_tensor.default(view_dtype, 2, fsdp)
wait_tensor_default_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
view_dtype_1 = aten.view.dtype(wait_tensor_default_1, torch.float8_e4m3fn)
t_default = aten.t.default(view_dtype_1)
_to_copy_5 = aten._to_copy.default(t_default, dtype=torch.float32)
div = aten.div.Tensor(_to_copy_5, view_default)
mm = aten.mm.default(x_1, div)
_to_copy_default_4 = aten._to_copy.default(_to_copy_6, dtype=torch.float32)
mul_tensor_2 = aten.mul.Tensor(_to_copy_default_4, view_default_1)
clamp_default_2 = aten.clamp.default(mul_tensor_2, -448.0, 448.0)
_to_copy_default_5 = aten._to_copy.default(clamp_default_2, dtype=torch.float8_e4m3fn)
view_dtype_2 = aten.view.dtype(_to_copy_default_5, torch.uint8)
all_gather_into_tensor_default_1 = _c10d_functional.all_gather_into_tensor.default(view_dtype_2, 2, fsdp)
wait_tensor_default_2 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default_1)
view_dtype_3 = aten.view.dtype(wait_tensor_default_2, torch.float8_e4m3fn)
t_default_1 = aten.t.default(view_dtype_3)
_to_copy_11 = aten._to_copy.default(t_default_1, dtype=torch.float32)
div_1 = aten.div.Tensor(_to_copy_11, view_default_1)
mm_1 = aten.mm.default(x_1, div_1)
return [mm, mm_1]
""",
    )
    assert report.counts == {"quantized": 2, "reductions_of_maxima": 1}
    assert report.refusals == ()


def test_half_the_bytes_are_gathered():
    before = collective_bytes(capture(block, A, B, X))
    graph_module, _ = run(block)
    maxima = 2 * 2  # in bfloat16
    assert collective_bytes(graph_module) - maxima == before // 2


def test_nothing_is_left_to_do_afterwards():
    graph_module, _ = run(block)
    text = program(graph_module)
    report = run_pass(QuantizeBeforeGather(), graph_module)
    assert not report.changed
    assert program(graph_module) == text


def test_does_nothing_where_nothing_is_quantized():
    _, report = run(lambda a, b, x: x @ weight(a, "layers.0.a").float().t())
    assert not report.changed
    assert report.refusals == ()


def test_an_activation_in_float8_is_no_weight_of_its_norm():
    def function(a, b, x):
        y = x * weight(a[:, 0], "layers.0.norm").float()
        return cast(y, scale_of(y.abs().max()))

    _, report = run(function)
    assert not report.changed
    assert report.refusals == ()


def test_the_backward_has_the_scale_of_the_forward():
    """Gathered again, quantized again, and the maximum is reduced once."""

    def function(a, b, x):
        with phase("forward"):
            first, last = weight(a, "layers.0.a"), weight(b, "layers.1.b")
            y = linear(x, first)
            z = linear(y, last.view(8, 4)[:, :4])
        with phase("backward"):
            return z @ last.float(), linear(x, first)

    graph_module, report = run(function, first=[ReshardAfterForward()])
    assert report.counts["quantized"] == 2
    assert report.counts["reductions_of_maxima"] == 1
    phases = [
        phase_of(node)
        for node in graph_module.graph.nodes
        if node.target is collectives.all_gather_into_tensor.default
        and "layers.0.a" in read_annotation(node, FsdpCollectiveAnnotation).parameter_names
    ]
    assert phases == ["forward", "backward"]


def reduced_over(group: str, amax):
    return collectives.wait_tensor(collectives.all_reduce(amax, "max", group))


def with_a_scale_reduced_over(other: str, *, fsdp: str, first=lambda amax: amax):
    def scale(weight):
        reduced = reduced_over(other, first(weight.abs().max().double()))
        return (reduced.clamp(min=1e-12).reciprocal() * 448).float()

    def function(a, b, x):
        wholes = [weight(a, "layers.0.a", group=fsdp), weight(b, "layers.0.b", group=fsdp)]
        return [cast(whole, scale(whole)) for whole in wholes]

    return function


def power_of_two(scale):
    return torch.exp2(torch.floor(torch.log2(scale)))


def test_powers_of_two_are_found_for_each_parameter_alone():
    """In a vector ``log2`` and ``exp2`` have other bits."""

    def function(a, b, x):
        wholes = [weight(a, "layers.0.a"), weight(b, "layers.0.b")]
        return [cast(whole, power_of_two(scale_of(whole.abs().max()))) for whole in wholes]

    graph_module, report = run(function)
    assert report.counts == {"quantized": 2, "reductions_of_maxima": 1}
    steps = [node for node in graph_module.graph.nodes if "2.default" in str(node.target)]
    assert [(n.target._schema.name, n.meta["val"].shape) for n in steps] == [
        ("aten::log2", ()),
        ("aten::exp2", ()),
    ] * 2


def test_other_maxima_over_ranks_are_reduced_for_all_of_a_block_too():
    with fake_world(rank=1, world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = (mesh.get_group(name).group_name for name in ("fsdp", "tp"))
        graph_module, _ = run(with_a_scale_reduced_over(tp, fsdp=fsdp))
    assert collective_counts(graph_module) == {"all_reduce": 2, "all_gather_into_tensor": 2}
    groups = [n.args[-1] for n in graph_module.graph.nodes if is_collective(n)]
    assert groups == [fsdp, tp, fsdp, fsdp]


def test_refuses_maxima_over_ranks_of_what_is_computed_for_each_parameter_alone():
    with fake_world(rank=1, world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = (mesh.get_group(name).group_name for name in ("fsdp", "tp"))
        _, report = run(with_a_scale_reduced_over(tp, fsdp=fsdp, first=torch.log2))
    assert [each.reason for each in report.refusals] == [
        "its scale is reduced over ranks after log2, which only approximates",
        "its scale is reduced over ranks after log2_1, which only approximates",
    ]


def test_refuses_maxima_over_ranks_that_are_no_axis_of_the_mesh():
    with fake_world(rank=0, world_size=6):
        fsdp, other = (dist.new_group(ranks).group_name for ranks in ([0, 2], [0, 1, 2]))
        _, report = run(with_a_scale_reduced_over(other, fsdp=fsdp))
    assert [each.reason for each in report.refusals] == [
        "all_reduce reduces its scale over ranks of another mesh than those it is of",
        "all_reduce_1 reduces its scale over ranks of another mesh than those it is of",
    ]


def test_quantized_parameters_of_a_block_are_gathered_in_one_bucket():
    graph_module, _ = run(block)
    run_pass(BucketAllGathers(), graph_module)
    assert collective_counts(graph_module) == {"all_reduce": 1, "all_gather_into_tensor": 1}


def test_what_computes_belongs_to_the_layer_and_what_communicates_to_fsdp():
    def function(a, b, x):
        with annotate(ModuleAnnotation(fqn="layers.0.a")):
            return linear(x, weight(a, "layers.0.a"))

    graph_module, _ = run(function)
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            assert read_annotation(node, ModuleAnnotation) == ModuleAnnotation(fqn="layers.0.a")
        if is_collective(node):
            assert read_annotation(node, FsdpCollectiveAnnotation).kind == "unshard"


def without_padding(shard, name, *, group):
    """A parameter of seven rows on four ranks, of which the last has one."""
    with annotate(FsdpCollectiveAnnotation(kind="unshard", parameter_names=(name,), mesh_axis="")):
        part = torch.cat([shard[:1], shard.new_zeros([1, 4])])
        return gathered(part, name, num_ranks=4, group=group).narrow(0, 0, 7)


def test_what_is_padded_by_zeros_is_quantized_with_its_padding():
    with fake_world(rank=3, world_size=4):
        group = dist.group.WORLD.group_name
        graph_module, report = run(
            lambda a, b, x: linear(x, without_padding(a, "layers.0.a", group=group))
        )
    assert report.counts == {"quantized": 1, "reductions_of_maxima": 1}
    (gathering,) = (
        node
        for node in graph_module.graph.nodes
        if node.target is collectives.all_gather_into_tensor.default
    )
    assert gathering.meta["val"].dtype == torch.uint8
    assert gathering.meta["val"].shape == (8, 4)


def test_padding_that_is_made_again_for_the_backward_makes_no_other_scale():
    def function(a, b, x):
        with phase("forward"):
            first, last = (
                without_padding(each, name, group=group)
                for each, name in ((a, "layers.0.a"), (b, "layers.1.b"))
            )
            linear(x, first)
        with phase("backward"):
            return linear(x, first), x @ last.t()

    with fake_world(rank=3, world_size=4):
        group = dist.group.WORLD.group_name
        _, report = run(function, first=[ReshardAfterForward()])
    assert report.counts == {"quantized": 2, "reductions_of_maxima": 1}


def test_refuses_padding_where_nobody_can_tell_which_part_is_this_ranks():
    _, report = run(lambda a, b, x: linear(x, without_padding(a, "layers.0.a", group="fsdp")))
    assert [each.reason for each in report.refusals] == [
        "slice_2 is no view of all its elements as they are"
    ]


def rowwise(a, b, x):
    whole = weight(a, "layers.0.a").t()
    return cast(whole, scale_of(whole.abs().amax(0, True)))


def with_another_reader(a, b, x):
    whole = weight(a, "layers.0.a")
    return linear(x, whole), whole.sum()


def read_in_part(a, b, x):
    return linear(x, weight(a, "layers.0.a")[:3])


def strided(a, b, x):
    whole = weight(a, "layers.0.a").as_strided((4, 4), (1, 4))
    return cast(whole, scale_of(whole.abs().max()))


def negated_later(a, b, x):
    whole = torch.ops.aten._neg_view(weight(a, "layers.0.a"))
    return cast(whole, scale_of(whole.abs().max()))


def clamped_before(a, b, x):
    whole = weight(a, "layers.0.a")
    scaled = whole.float().clamp(-448.0, 448.0) * scale_of(whole.abs().max())
    return scaled.clamp(-448.0, 448.0).to(E4M3)


def clamped_twice(a, b, x):
    whole = weight(a, "layers.0.a")
    scaled = whole.float() * scale_of(whole.abs().max())
    return scaled.clamp(-448.0, 448.0).clamp(-448.0, 448.0).to(E4M3)


def clamped_more(a, b, x):
    whole = weight(a, "layers.0.a")
    return (whole.float() * scale_of(whole.abs().max())).clamp(-100.0, 100.0).to(E4M3)


def divided(a, b, x):
    whole = weight(a, "layers.0.a")
    return (whole.float() / scale_of(whole.abs().max())).clamp(-448.0, 448.0).to(E4M3)


def without_scale(a, b, x):
    return weight(a, "layers.0.a").to(E4M3)


def in_another_dtype(a, b, x):
    whole = weight(a, "layers.0.a")
    scaled = whole.double() * scale_of(whole.abs().max())
    return scaled.clamp(-448.0, 448.0).to(E4M3)


def by_a_scale(scale):
    """Quantized by what a function makes of the largest magnitude."""

    def function(a, b, x):
        whole = weight(a, "layers.0.a")
        return cast(whole, scale(whole.abs().max().float()))

    return function


def cast_once(a, b, x):
    wide = weight(a, "layers.0.a").float()
    return (wide * scale_of(wide.abs().max())).clamp(-448.0, 448.0).to(E4M3)


def by_another_scale(a, b, x):
    return cast(weight(a, "layers.0.a"), scale_of(x.abs().max()))


def in_two_ways(a, b, x):
    whole = weight(a, "layers.0.a")
    scale = scale_of(whole.abs().max())
    other = (whole.float() * scale).clamp(-57344.0, 57344.0).to(torch.float8_e5m2)
    return cast(whole, scale), other


def clamped_otherwise(a, b, x):
    whole = weight(a, "layers.0.a")
    scale = scale_of(whole.abs().max())
    return cast(whole, scale), (whole.float() * scale).clamp(-100.0, 100.0).to(E4M3)


def of_a_maximum_that_is_read(a, b, x):
    whole = weight(a, "layers.0.a")
    amax = whole.abs().max()
    return cast(whole, scale_of(amax)), amax


def along_two_axes(a, b, x):
    return linear(x, gathered(weight(a, "layers.0.a"), "layers.0.a", group="other"))


def written(a, b, x):
    y = linear(x, weight(a, "layers.0.a"))
    a.add_(1.0)
    return y


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (rowwise, "it has a scale for each row or column, which ranks would have to gather too"),
        (with_another_reader, "sum_1 reads it as it is"),
        (by_another_scale, "its scale is not that of its largest magnitude alone"),
        (in_two_ways, "it is quantized in several ways"),
        (clamped_otherwise, "clamp_2 clamps it to other bounds than those of its dtype"),
        (clamped_more, "clamp_1 clamps it to other bounds than those of its dtype"),
        (clamped_before, "clamp is no part of a scaled cast"),
        (clamped_twice, "clamp_2 is no part of a scaled cast"),
        (divided, "div is no part of a scaled cast"),
        (without_scale, "_to_copy_1 is no part of a scaled cast"),
        (in_another_dtype, "_to_copy_1 is not in float32, in which it must be scaled"),
        (cast_once, "_to_copy_1 is read for something else than to quantize it"),
        (read_in_part, "slice_1 is no view of all its elements as they are"),
        (strided, "as_strided is no view of all its elements as they are"),
        (negated_later, "_neg_view is no view of all its elements as they are"),
        (
            by_a_scale(lambda amax: amax * amax),
            "its scale is made by mul, which does not round one number exactly",
        ),
        (
            by_a_scale(lambda amax: torch.pow(2.0, amax)),
            "its scale is made by pow_1, which does not round one number exactly",
        ),
        (
            by_a_scale(lambda amax: amax.exp()),
            "its scale is made by exp, which does not round one number exactly",
        ),
        (of_a_maximum_that_is_read, "something else is made of its largest magnitude"),
        (along_two_axes, "its shard is gathered along another axis before"),
        (written, "a_1 shares memory that is written to"),
    ],
)
def test_refuses_what_would_have_another_scale_or_is_needed_as_it_is(function, reason):
    graph_module = capture(function, A, B, X)
    text = program(graph_module)
    report = run_pass(QuantizeBeforeGather(), graph_module)
    assert [each.reason for each in report.refusals] == [reason]
    assert program(graph_module) == text


@pytest.mark.parametrize("values", [A, torch.zeros(2, 4), A * 1e-20, A * 1e30])
def test_every_bit_is_that_of_what_was_gathered_and_quantized(values, one_rank_group):
    def function(a, b, x):
        return linear(x, weight(a, "layers.0.a", num_ranks=1, group=one_rank_group))

    graph_module = capture(function, A, B, X)
    before = graph_module(values, B, X)
    run_pass(QuantizeBeforeGather(), graph_module)
    graph_module.recompile()
    assert same_bits(graph_module(values, B, X), before)


def test_a_scale_has_the_same_bits_among_many_as_alone(one_rank_group):
    """Loops over several numbers are vectorized, and what is left over is not."""
    generator = torch.Generator().manual_seed(4)
    shards = [torch.randn(2, 4, generator=generator) for _ in range(37)]

    def function(*shards):
        results = []
        for index, shard in enumerate(shards):
            whole = weight(shard, f"layers.0.{index}", num_ranks=1, group=one_rank_group)
            amax = whole.abs().max().float()
            scale = ((amax.sqrt() / 3).clamp(min=1e-12).reciprocal() * 447).floor() * 0.1
            scale = (power_of_two(scale).log2() * 0.37).exp2() * 1.1
            results += [cast(whole, scale).view(torch.uint8), scale]
        return results

    graph_module = capture(function, *shards)
    before = graph_module(*shards)
    report = run_pass(QuantizeBeforeGather(), graph_module)
    assert report.counts == {"quantized": 37, "reductions_of_maxima": 1}
    graph_module.recompile()
    assert same_bits(graph_module(*shards), before)
