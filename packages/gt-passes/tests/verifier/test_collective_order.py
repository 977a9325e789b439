"""The sequence of collectives is the same text on every rank, and says where ranks part."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from inductor_cases import COMPILER
from pass_graphs import capture, collectives, node_of, run_pass
from recorded_step_cases import ON_CPU
from sharded_step_cases import capture_two_microbatches, run_recipe
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule

from gt_passes import (
    CompileWholeGraph,
    CudaGraphs,
    PassContext,
    PassManager,
    RemoveDeadCode,
)
from gt_passes.analysis.outlined_region import OutlinedRegion, RegionOutliner
from gt_passes.testing import FakeRecorder
from gt_passes.verifier.collective_order import (
    CollectiveSequence,
    collective_digest,
    compare_collective_sequences,
)
from gt_trace.testing import fake_world

X = torch.ones(8, 6)
RANKS = (0, 3, 5)
"""Of a world of 8 in a mesh of 2 x 4: no two of them share both groups."""


def on_ranks(
    step: Callable[[DeviceMesh], GraphModule], ranks: tuple[int, ...] = RANKS
) -> dict[int, CollectiveSequence]:
    """What each rank of a world of 8 would launch, one rank after another."""
    sequences = {}
    for rank in ranks:
        with fake_world(rank=rank, world_size=8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            sequences[rank] = CollectiveSequence.of(step(mesh))
    return sequences


def reduced_then_gathered(mesh: DeviceMesh) -> GraphModule:
    names = [mesh.get_group(axis).group_name for axis in ("dp", "tp")]

    def step(x):
        total = collectives.wait_tensor(collectives.all_reduce(x, "sum", names[0]))
        return collectives.wait_tensor(collectives.all_gather_into_tensor(total, 4, names[1]))

    return capture(step, X)


def test_ranks_of_other_groups_launch_the_same_text():
    sequences = on_ranks(reduced_then_gathered)
    names = {sequence.calls[0].group_name for sequence in sequences.values()}
    assert len(names) > 1
    assert compare_collective_sequences(sequences) == ()
    assert len({sequence.digest for sequence in sequences.values()}) == 1
    assert_expected_inline(
        sequences[3].text,
        """\
_c10d_functional.all_reduce over 2 ranks, 4 apart: input=float32[8, 6], reduce_op='sum'
_c10d_functional.all_gather_into_tensor over 4 ranks, 1 apart: input=float32[8, 6], group_size=4
""",
    )


def test_swapped_collectives_on_one_rank_are_found():
    def step(mesh: DeviceMesh) -> GraphModule:
        graph_module = reduced_then_gathered(mesh)
        if dist.get_rank() == 5:
            reduce = node_of(graph_module, "all_reduce")
            gather = node_of(graph_module, "all_gather_into_tensor")
            reduce.args, gather.args = (
                (gather.args[0], "sum", reduce.args[2]),
                (reduce.args[0], 4, gather.args[2]),
            )
            node_of(graph_module, "wait_tensor").append(reduce)
            reduce.prev.prev.prepend(gather)
        return graph_module

    (difference,) = compare_collective_sequences(on_ranks(step))
    assert difference.position == 0
    assert difference.ranks == (0, 5)
    assert "rank 5 launches _c10d_functional.all_gather_into_tensor" in str(difference)


def test_another_axis_of_the_same_size_on_one_rank_is_found():
    def step(mesh: DeviceMesh) -> GraphModule:
        axis = "tp" if dist.get_rank() == 3 else "dp"
        group = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))[axis]
        name = group.get_group().group_name
        return capture(lambda x: collectives.wait_tensor(collectives.all_reduce(x, "sum", name)), X)

    (difference,) = compare_collective_sequences(on_ranks(step))
    assert_expected_inline(
        str(difference)
        .replace(difference.calls[0].group_name, "a")
        .replace(difference.calls[1].group_name, "b"),
        """\
collective 0 is not the same on every rank:
  rank 0 launches _c10d_functional.all_reduce over 2 ranks, 4 apart, group 2 of these: input=float32[8, 6], reduce_op='sum' (node all_reduce, group 'a')
  rank 3 launches _c10d_functional.all_reduce over 2 ranks, 2 apart: input=float32[8, 6], reduce_op='sum' (node all_reduce, group 'b')""",
    )


def test_the_second_group_of_the_same_ranks_is_another_group():
    def step(mesh: DeviceMesh) -> GraphModule:
        groups = [dist.new_group(list(range(8))) for _ in range(2)]
        name = groups[dist.get_rank() == 3].group_name
        return capture(lambda x: collectives.wait_tensor(collectives.all_reduce(x, "sum", name)), X)

    (difference,) = compare_collective_sequences(on_ranks(step))
    assert difference.ranks == (0, 3)
    assert "8 ranks, 1 apart, group 2 of these" in str(difference)
    assert "8 ranks, 1 apart, group 3 of these" in str(difference)


def test_a_rank_on_which_two_exchanges_happen_to_be_of_one_value_is_found():
    """There a pass may share them, and read one for the other; elsewhere that would be wrong."""

    def step(mesh: DeviceMesh) -> GraphModule:
        name = mesh.get_group("tp").group_name
        is_odd = dist.get_rank() == 5

        def gathered(x):
            values = (x.sin(), x.sin() if is_odd else x.cos())
            return [
                collectives.wait_tensor(collectives.all_gather_into_tensor(value, 4, name))
                for value in values
            ]

        graph_module = capture(gathered, X)
        run_pass(RemoveDeadCode(), graph_module)
        return graph_module

    (difference,) = compare_collective_sequences(on_ranks(step))
    assert (difference.position, difference.ranks) == (1, (0, 5))
    assert difference.calls[0].text.endswith(", exchange 1")
    assert difference.calls[1].text.endswith(", exchange 0")


@pytest.mark.slow  # compiles with Inductor
def test_collectives_in_compiled_regions_count():
    graph_module = capture(lambda x: reduced(x).cos(), X)
    before = CollectiveSequence.of(graph_module)
    outliner = RegionOutliner(graph_module)
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    outline = outliner.outline(calls)
    body = outliner.body(outline)
    outliner.replace(outline, OutlinedRegion(body, body), stem="region")
    outliner.finish()
    assert len(before.calls) == 1
    assert CollectiveSequence.of(graph_module) == before


def gathered_in_turn(mesh: DeviceMesh, *, swapped: bool = False) -> GraphModule:
    """Two all-gathers, compiled by Inductor as one program that a CUDA graph records."""
    names = [mesh.get_group(axis).group_name for axis in ("dp", "tp")]
    sizes = [2, 4]

    def step(x):
        order = (1, 0) if swapped else (0, 1)
        gathered = {
            axis: collectives.wait_tensor(
                collectives.all_gather_into_tensor(x + axis, sizes[axis], names[axis])
            )
            for axis in order
        }
        return gathered[0].sin(), gathered[1].cos()

    graph_module = capture(step, X)
    PassManager([RemoveDeadCode()], context=PassContext.from_graph(graph_module)).run(graph_module)
    return graph_module


def compiled_and_recorded(graph_module: GraphModule) -> GraphModule:
    run_pass(CompileWholeGraph(compiler=COMPILER), graph_module)
    report = run_pass(CudaGraphs(target=ON_CPU, new_recorder=FakeRecorder), graph_module)
    assert report.counts["pieces"] == 1
    return graph_module


def test_a_program_of_inductor_that_is_recorded_launches_what_the_graph_did():
    plain = on_ranks(gathered_in_turn)
    sequences = on_ranks(lambda mesh: compiled_and_recorded(gathered_in_turn(mesh)))
    for rank in RANKS:
        assert sequences[rank].text == plain[rank].text
        assert sequences[rank].text.count(", exchange ") == 2
    assert compare_collective_sequences(sequences) == ()


def test_a_rank_that_launches_in_another_order_is_found_in_compiled_programs():
    sequences = on_ranks(
        lambda mesh: compiled_and_recorded(gathered_in_turn(mesh, swapped=dist.get_rank() == 3))
    )
    (difference,) = compare_collective_sequences(sequences)
    assert (difference.position, difference.ranks) == (0, (0, 3))


def reduced(x):
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp"))


def test_a_rank_that_launches_less_is_found():
    def step(mesh: DeviceMesh) -> GraphModule:
        graph_module = reduced_then_gathered(mesh)
        if dist.get_rank() == 0:
            wait = node_of(graph_module, "wait_tensor_1")
            wait.replace_all_uses_with(node_of(graph_module, "wait_tensor"))
            graph_module.graph.erase_node(wait)
            graph_module.graph.erase_node(node_of(graph_module, "all_gather_into_tensor"))
        return graph_module

    differences = compare_collective_sequences(on_ranks(step))
    assert [difference.ranks for difference in differences] == [(0, 3), (0, 5)]
    assert "rank 0 launches no more" in str(differences[0])


def test_other_sizes_dtypes_and_reductions_are_found():
    def variant(rows: int, dtype: torch.dtype, reduction: str) -> CollectiveSequence:
        x = torch.ones(rows, dtype=dtype)
        return CollectiveSequence.of(
            capture(lambda x: collectives.wait_tensor(collectives.all_reduce(x, reduction, "g")), x)
        )

    variants = [
        variant(4, torch.float32, "sum"),
        variant(5, torch.float32, "sum"),
        variant(4, torch.bfloat16, "sum"),
        variant(4, torch.float32, "avg"),
    ]
    assert len({sequence.digest for sequence in variants}) == 4
    assert variant(4, torch.float32, "sum") == variants[0]


def exchanged_rows(splits: torch.Tensor, *, num_dead_sizes: int = 0) -> CollectiveSequence:
    def step(x, splits):
        for size in splits.tolist() * num_dead_sizes:
            torch._check(size >= 0)
        sizes = splits.tolist()
        for size in sizes:
            torch._check(size >= 0)
        exchange = collectives.all_to_all_single(x, sizes, sizes, "ep")
        return collectives.wait_tensor(exchange)

    return CollectiveSequence.of(capture(step, X, splits))


def test_data_dependent_sizes_are_numbered_by_appearance():
    plain = exchanged_rows(torch.tensor([2, 6]))
    assert plain.text == exchanged_rows(torch.tensor([5, 3]), num_dead_sizes=1).text
    assert_expected_inline(
        plain.text,
        """\
_c10d_functional.all_to_all_single over group 'ep': input=float32[rows, 6], output_split_sizes=2 sizes, each rank its own, input_split_sizes=2 sizes, each rank its own
""",
    )
    assert plain.digest != exchanged_rows(torch.tensor([2, 3, 3])).digest


def test_real_sharded_steps_agree_on_every_rank_after_the_recipe():
    digests = set()
    for rank in RANKS:
        with fake_world(rank=rank, world_size=8):
            step, _, _ = capture_two_microbatches()
            run_recipe(step)
            digests.add(collective_digest(step.graph_module))
    assert len(digests) == 1


def test_the_digest_is_the_same_in_another_process():
    program = (
        "import sys; sys.path[:0] = {path!r}; import torch\n"
        "from test_collective_order import exchanged_rows\n"
        "print(exchanged_rows(torch.tensor([2, 6])).digest)"
    ).format(path=[str(__import__("pathlib").Path(__file__).parent)])
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == exchanged_rows(torch.tensor([2, 6])).digest


def test_a_sequence_outlives_its_process_groups():
    sequence = on_ranks(reduced_then_gathered, (5,))[5]
    assert pickle.loads(pickle.dumps(sequence)) == sequence
    assert "2 ranks, 4 apart" in sequence.text
