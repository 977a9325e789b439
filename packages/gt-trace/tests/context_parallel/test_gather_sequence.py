"""Keys and values of all ranks, and what their gradients become."""

from __future__ import annotations

from sequence_cases import compare_with_torch, refused_mesh, what_a_trace_holds

from gt_trace.testing import GlooWorkers


def test_gathers_and_reduces_the_bits_of_pytorchs_operator(two: GlooWorkers) -> None:
    for found in two.run(compare_with_torch):
        assert found == [True] * 4


def test_a_trace_holds_annotated_collectives_that_are_all_launched_first(two: GlooWorkers) -> None:
    for found in two.run(what_a_trace_holds):
        assert found == [
            ("all_gather_into_tensor", "forward", "gather", "cp"),
            ("all_gather_into_tensor", "forward", "gather", "cp"),
            ("wait_tensor", "forward", "gather", "cp"),
            ("wait_tensor", "forward", "gather", "cp"),
            ("reduce_scatter_tensor", "backward", "reduce_grad", "cp"),
            ("reduce_scatter_tensor", "backward", "reduce_grad", "cp"),
            ("wait_tensor", "backward", "reduce_grad", "cp"),
            ("wait_tensor", "backward", "reduce_grad", "cp"),
        ]


def test_refuses_a_mesh_of_several_axes(two: GlooWorkers) -> None:
    for message in two.run(refused_mesh):
        assert message.endswith(
            "has the axes ('cp', 'tp'); allowed: one named axis, whose ranks share a sequence"
        )
