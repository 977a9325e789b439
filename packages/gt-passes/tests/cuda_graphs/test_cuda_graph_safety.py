"""Of every kind of node that cannot be recorded: that it is found, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from device_graphs import capture_on
from expecttest import assert_expected_inline
from inductor_cases import flex_attention_graph
from pass_graphs import capture, collectives, run_pass
from torch.distributed import distributed_c10d

from gt_passes import CompileWholeGraph, DescribeOnly
from gt_passes._torch_compilation_internals import load_symmetric_memory_operators
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.analysis.host_copies import OFFLOAD
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget, find_obstacles

aten = torch.ops.aten
X = torch.empty(4, 4, device="meta")
HOST = torch.ones(4, 4)
CUDA = CaptureTarget(backend_of_group={"tp": "nccl", "cpu": "gloo"}.get)


def reasons(graph_module, target=CUDA, num_static_inputs=0):
    found = find_obstacles(graph_module, target, num_static_inputs=num_static_inputs)
    return "\n".join(f"{obstacle.node.name}: {obstacle.reason}" for obstacle in found)


def test_kernels_on_the_device_can_be_recorded():
    def step(w, x):
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(x, 2, "tp"))
        w.add_(1)
        noise = torch.rand(8, 4, device="cuda")
        return (gathered @ w + noise).relu() * 2, torch.arange(4, device="cuda")

    assert reasons(capture_on(step, X, X), num_static_inputs=1) == ""


def test_results_brought_to_the_host():
    def step(x):
        n = x.sum().to(torch.int64).item()
        y = x.nonzero()
        return y * 2, x * n, x.cpu(), x.clone()

    assert_expected_inline(
        reasons(capture_on(step, X)),
        """\
_local_scalar_dense: aten::_local_scalar_dense brings a result of the device to the host
nonzero: aten::nonzero brings a result of the device to the host
mul: sizes that aten::mul reads or makes depend on data
mul_1: sizes that aten::mul reads or makes depend on data
_to_copy_1: it copies from cuda to newly allocated host memory""",
    )


def test_a_mask_as_an_index_is_counted_on_the_host():
    def step(x):
        y = x.clone()
        y.index_put_((x > 0,), torch.zeros((), device="cuda"))
        return y, x[torch.zeros(2, dtype=torch.int64, device="cuda")]

    assert_expected_inline(
        reasons(capture_on(step, X)),
        """index_put_: aten::index_put_ counts the true elements of a mask on the host""",
    )


def test_host_memory():
    def step(on_host, x):
        return x + on_host.to("cuda"), on_host * 2, x * torch.tensor(3.0)

    graph_module = capture_on(step, HOST, X)
    assert_expected_inline(
        reasons(graph_module),
        """\
_to_copy: it reads on_host_1, host memory whose address changes
mul: it runs on cpu""",
    )
    assert_expected_inline(
        reasons(graph_module, num_static_inputs=2),
        """\
_to_copy: it reads on_host_1, host memory that is not pinned
mul: it runs on cpu""",
    )


def test_a_graph_on_the_cpu_has_nothing_to_record():
    assert_expected_inline(
        reasons(capture(lambda x: (x.sin(), x.split(2)[0].cos()), HOST)),
        """\
sin: it runs on cpu
split: it runs on cpu
getitem: it is an item of split, which is not recorded
getitem_1: it is an item of split, which is not recorded
cos: it runs on cpu""",
    )


def test_operators_of_others():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("fused(Tensor x) -> Tensor")
        library.define("known(Tensor x) -> Tensor")
        library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        for name in ("fused", "known", "unsafe"):
            library.impl(name, lambda x: x.clone(), "CompositeExplicitAutograd")
        ours = torch.ops.gt_passes_test

        graph_module = capture_on(lambda x: (ours.fused(x), ours.known(x), ours.unsafe(x)), X)
        target = CaptureTarget(
            safe_operators=frozenset({"gt_passes_test::known", "gt_passes_test::unsafe"})
        )
        assert_expected_inline(
            reasons(graph_module, target),
            """\
fused: gt_passes_test::fused is a custom operator that nobody has declared safe to record
unsafe: gt_passes_test::unsafe is tagged cudagraph_unsafe""",
        )


def fused_products(x, w):
    fused = torch.ops.symm_mem
    gathered, products = fused.fused_all_gather_matmul(x, [w], 0, "tp")
    return fused.fused_matmul_reduce_scatter(products[0], w, "sum", 0, "tp"), gathered


def test_products_fused_with_collectives_of_symmetric_memory_can_be_recorded(monkeypatch):
    load_symmetric_memory_operators()
    # What they make is read off a process group; here it only has to have a size.
    monkeypatch.setattr(distributed_c10d, "_get_group_size_by_name", lambda name: 2)
    graph_module = capture_on(fused_products, X, X)
    targets = [str(node.target) for node in graph_module.graph.nodes]
    assert "symm_mem.fused_all_gather_matmul.default" in targets
    assert "symm_mem.fused_matmul_reduce_scatter.default" in targets
    assert reasons(graph_module, num_static_inputs=1) == ""


def test_other_operators_of_symmetric_memory_are_not_known():
    load_symmetric_memory_operators()
    graph_module = capture_on(lambda x: x + 1, X)
    (add,) = graph_module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.target, add.args = (
        torch.ops.symm_mem.one_shot_all_reduce.default,
        (add.args[0], "sum", "tp"),
    )
    assert_expected_inline(
        reasons(graph_module),
        """add: symm_mem::one_shot_all_reduce is a custom operator that nobody has declared safe to record""",
    )


def offloading(x):
    y = x.sin()
    host = torch.ops.gt_passes.wait_copy(OFFLOAD(y), y)
    back = torch.ops.gt_passes.reload(host, x.device)
    return torch.ops.gt_passes.wait_copy(back, host).cos()


def test_copies_to_host_memory_and_back_can_be_recorded():
    assert reasons(capture_on(offloading, X)) == ""


def test_copies_to_host_memory_in_a_compiled_program_cannot():
    graph_module = capture_on(offloading, X)
    run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph_module)
    assert_expected_inline(
        reasons(graph_module),
        """\
run_region: inside it, offload: a compiled program makes new host memory for what it copies there
getitem: it is an item of run_region, which is not recorded""",
    )


def test_copies_from_host_memory_that_moves():
    graph_module = capture_on(lambda x, h: torch.ops.gt_passes.reload(h, x.device) + x, X, HOST)
    assert_expected_inline(
        reasons(graph_module),
        """reload: it copies h_1, whose address changes""",
    )


def test_copies_into_buckets_and_out_of_them_can_be_recorded():
    def step(x):
        half = x.numel() // 2
        return UNPACK_BUCKET(PACK_BUCKET([x, x + 1], 2, torch.bfloat16), 2, [half, half])

    assert reasons(capture_on(step, X)) == ""


def test_collectives_by_the_backend_of_their_group():
    def step(x):
        waits = [
            collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
            for group in ("tp", "cpu", "unknown")
        ]
        return waits[0] + waits[1] + waits[2]

    assert_expected_inline(
        reasons(capture_on(step, X)),
        """\
all_reduce_1: it runs over gloo, whose collectives run on the host
all_reduce_2: the backend of its process group 'unknown' is not known""",
    )


def test_random_numbers_from_a_generator_of_ones_own():
    generator = torch.Generator()
    graph_module = capture_on(lambda x: x + 1, X)
    (add,) = graph_module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.target, add.args = aten.rand.generator, ([4, 4],)
    add.kwargs = {"generator": generator, "device": torch.device("cuda")}
    assert_expected_inline(
        reasons(graph_module),
        """add: aten::rand draws from a generator whose state is not registered with the graph""",
    )


def test_writes_to_memory_whose_address_changes():
    def step(state, x):
        state.add_(1)
        x.mul_(2)
        return state + x

    graph_module = capture_on(step, X, X)
    assert_expected_inline(
        reasons(graph_module, num_static_inputs=1),
        """\
mul_: it reads x_1, which is written to and whose address changes
add: it reads mul_, which is written to and whose address changes""",
    )


def test_a_product_by_groups_depends_on_the_hardware():
    def step(x, w, offsets):
        return torch._grouped_mm(x, w, offsets)

    x = torch.empty(32, 16, device="meta", dtype=torch.bfloat16)
    w = torch.empty(2, 16, 16, device="meta", dtype=torch.bfloat16)
    graph_module = capture_on(step, x, w, torch.empty(2, device="meta", dtype=torch.int32))
    assert_expected_inline(
        reasons(graph_module, CaptureTarget(compute_capability=(9, 0))),
        """_grouped_mm: aten::_grouped_mm may copy its offsets to the host below compute capability 10.0""",
    )
    assert reasons(graph_module, CaptureTarget(compute_capability=(10, 0))) == ""


def test_an_output_that_no_copy_reproduces():
    graph_module = capture_on(lambda x: (x.sin()[:, :2], x.cos().t()), X)
    assert_expected_inline(
        reasons(graph_module),
        """\
sin: it shares memory with the output slice_1, whose strides no copy keeps
slice_1: it shares memory with the output slice_1, whose strides no copy keeps""",
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_regions_are_judged_by_what_is_in_them(compiled):
    graph_module = capture_on(lambda x: x.sin() * x.sum().item(), X)
    if compiled:
        run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph_module)
        assert_expected_inline(
            reasons(graph_module),
            """\
run_region: inside it, _local_scalar_dense: aten::_local_scalar_dense brings a result of the device to the host
getitem: it is an item of run_region, which is not recorded""",
        )
    else:
        assert reasons(graph_module).count("\n") == 1


def test_flex_attention_can_be_recorded():
    graph_module, _ = flex_attention_graph(num_layers=1)
    assert reasons(graph_module, CaptureTarget(device_type="cpu")) == ""
