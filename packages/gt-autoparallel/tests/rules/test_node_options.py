"""What node_options offers, refuses and caches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from operator_samples import SAMPLES
from sample_values import call, close, ids, ints
from simulated_ranks import Sample, node_of, option_text, options_of, spec_of, wrong_options

from gt_autoparallel.errors import UnsupportedOperatorError
from gt_autoparallel.graph.layouts import MeshShape, fits
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, TensorSpec, Value
from gt_autoparallel.rules import (
    DimLabels,
    OperatorCall,
    check_operators,
    labelled,
    node_options,
    register_rule,
    replicated_operators,
)
from gt_autoparallel.rules.mesh_options import layouts_of
from gt_autoparallel.rules.registry import FAMILIES, forget_rule

ONE = MeshShape(names=("tp",), sizes=(2,))
TWO = MeshShape(names=("dp", "tp"), sizes=(2, 2))
aten = torch.ops.aten


@torch.library.custom_op("gt_rules_test::gate", mutates_args=())
def gate(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@torch.library.custom_op("gt_rules_test::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape=shape, stride=(1,) * len(shape), dtype=dtype)


def node(target: Any, *args: Any, kind: Any = "operator", **changes: Any) -> PlacementNode:
    fields = {"index": 9, "name": "n", "outputs": (spec(4, 4),), **changes}
    return PlacementNode(kind=kind, target=target, args=args, **fields)


def texts(sample: Sample, mesh: MeshShape = ONE) -> list[str]:
    return [option_text(option) for option in options_of(sample, mesh)]


class TestOptions:
    def test_of_a_product_are_whole_rows_contraction_and_columns(self) -> None:
        assert texts(call("mm", ints(4, 4), ints(4, 4))) == [
            "R, R -> R",
            "S(0), R -> S(0)",
            "S(1), S(0) -> P(sum)",
            "R, S(1) -> S(1)",
        ]

    def test_of_a_sum_take_partial_operands_only_together(self) -> None:
        assert texts(call("add.Tensor", ints(4, 4), ints(4))) == [
            "R, R -> R",
            "S(0), R -> S(0)",
            "S(1), S(0) -> S(1)",
            "P(sum), P(sum) -> P(sum)",
        ]

    def test_of_adding_a_number_take_no_partial_operand(self) -> None:
        assert texts(call("add.Tensor", ints(4), 1.0)) == ["R -> R", "S(0) -> S(0)"]

    def test_of_a_cast_take_partial_sums_up_but_not_down(self) -> None:
        up = call("_to_copy", ints(3, dtype=torch.float32), dtype=torch.float64)
        assert texts(up) == ["R -> R", "P(sum) -> P(sum)"]
        assert texts(call("_to_copy", ints(3), dtype=torch.float32)) == ["R -> R"]

    def test_cut_every_tensor_evenly_also_where_two_axes_cut_one_dim(self) -> None:
        sample = call("mm", ints(6, 4), ints(4, 3))
        four = MeshShape(names=("a", "b"), sizes=(2, 2))
        options = options_of(sample, four)
        specs = [spec(6, 4), spec(4, 3)]
        for option in options:
            for operand, layout in zip(specs, option.operands, strict=True):
                assert fits(operand.shape, layout, four)
        assert "S(1) S(1), S(0) S(0) -> P(sum) P(sum)" in texts(sample, four)
        assert "S(0) S(0), R R -> S(0) S(0)" not in texts(sample, four)

    @pytest.mark.parametrize("sample", SAMPLES[::7], ids=lambda sample: sample.operator)
    def test_come_without_duplicates_whole_first_and_for_each_axis(self, sample: Sample) -> None:
        options = options_of(sample, TWO)
        layouts = [(option.operands, option.outputs) for option in options]
        assert len(set(layouts)) == len(layouts)
        assert all(p.is_replicate() for layout in options[0].operands for p in layout)
        for option in options:
            for axis, chosen in enumerate(option.axis_options):
                assert chosen.operands == tuple(layout[axis] for layout in option.operands)

    def test_are_made_once_for_nodes_that_differ_in_name_only(self) -> None:
        operands = (spec(4, 4), spec(4, 4))
        first = node_options(node(aten.mm.default, Value(0), Value(1)), operands, TWO)
        again = node(aten.mm.default, Value(5), Value(5), name="other", index=7)
        assert node_options(again, operands, TWO) is first

    def test_depend_on_constants(self) -> None:
        outputs = (spec(4),)
        over = [
            node_options(
                node(aten.sum.dim_IntList, Value(0), [dim], outputs=outputs), (spec(4, 4),), ONE
            )
            for dim in (0, 1)
        ]
        assert over[0] != over[1]


class TestImportantOptions:
    """What hand-written plans consist of must be among the options."""

    def test_megatron_products(self) -> None:
        column = call("mm", ints(8, 4), ints(4, 8))
        assert "S(0) R, R S(1) -> S(0) S(1)" in texts(column, TWO)
        row = call("mm", ints(8, 8), ints(8, 4))
        assert "S(0) S(1), R S(0) -> S(0) P(sum)" in texts(row, TWO)
        with_bias = call("addmm", ints(4), ints(8, 8), ints(8, 4))
        assert "R R, S(0) S(1), R S(0) -> S(0) P(sum)" in texts(with_bias, TWO)

    def test_vocabulary_parallel_embedding(self) -> None:
        table = call("embedding", ints(8, 4), ids(4, 4, below=8))
        assert "R S(0), S(0) R -> S(0) P(sum)" in texts(table, TWO)

    def test_sequence_parallel_norms(self) -> None:
        norm = close("native_layer_norm", ints(4, 4, 2), [2], ints(2), ints(2), 1e-5)
        assert "S(0) S(1), R R, R R -> S(0) S(1), S(0) S(1), S(0) S(1)" in texts(norm, TWO)

    def test_head_parallel_attention(self) -> None:
        name = "_scaled_dot_product_flash_attention_for_cpu.default"
        sample = next(s for s in SAMPLES if s.operator == f"aten.{name}")
        heads = "S(0) S(1)"
        assert f"{heads}, {heads}, {heads} -> {heads}, {heads}" in texts(sample, TWO)

    def test_heads_of_a_flat_projection(self) -> None:
        assert "S(0) S(2) -> S(0) S(2)" in texts(call("view", ints(4, 4, 8), [4, 4, 4, 2]), TWO)
        assert "S(0) -> S(0)" in texts(call("view", ints(4, 4, 8), [16, 8]))


class TestOtherKinds:
    def test_sources_have_every_even_layout(self) -> None:
        options = node_options(node("w", kind="parameter", outputs=(spec(4, 3),)), (), TWO)
        found = [option_text(option) for option in options]
        assert found == [" -> R R", " -> R S(0)", " -> S(0) R", " -> S(0) S(0)"]

    def test_shares_also_hold_sums(self) -> None:
        share = node("share", Value(0), kind="share", outputs=(spec(3),))
        found = [option_text(option) for option in node_options(share, (spec(3),), ONE)]
        assert found == ["R -> R", "P(sum) -> P(sum)"]

    def test_sinks_hold_no_sums(self) -> None:
        for kind in ("output", "gradient"):
            sink = node("w", Value(0), kind=kind, outputs=())
            found = [option_text(option) for option in node_options(sink, (spec(4),), ONE)]
            assert found == ["R -> ", "S(0) -> "]

    def test_experts_are_no_matter_of_rules(self) -> None:
        with pytest.raises(
            ValueError, match="node 'n' is of kind 'experts': no rule makes its options"
        ):
            node_options(node("moe", kind="experts"), (), ONE)

    @pytest.mark.parametrize("shape", [(), (4,), (8, 6), (4, 1, 2)])
    def test_layouts_are_those_that_fit(self, shape: tuple[int, ...]) -> None:
        mesh = MeshShape(names=("a", "b", "c"), sizes=(2, 2, 2))
        single = [
            layout[0]
            for layout in layouts_of(
                spec(*shape), MeshShape(names=("a",), sizes=(1,)), allow_partial=True
            )
        ]
        expected = {
            layout for layout in itertools.product(single, repeat=3) if fits(shape, layout, mesh)
        }
        found = layouts_of(spec(*shape), mesh, allow_partial=True)
        assert set(found) == expected
        assert len(found) == len(expected)

    def test_truth_values_are_never_sums(self) -> None:
        layouts = layouts_of(spec(3, dtype=torch.bool), ONE, allow_partial=True)
        assert [layout[0].is_replicate() for layout in layouts] == [True]


class TestRefusals:
    def graph(self, *targets: Any) -> PlacementGraph:
        source = PlacementNode(index=0, name="x", kind="input", target="x", outputs=(spec(4, 4),))
        nodes = [
            node(target, Value(0), index=index, name=f"n{index}", module="layers.0.mlp")
            for index, target in enumerate(targets, start=1)
        ]
        return PlacementGraph(nodes=(source, *nodes), parameter_aliases={})

    def test_names_every_operator_without_rule(self) -> None:
        graph = self.graph(
            torch.ops.gt_rules_test.unknown.default,
            aten.relu.default,
            aten.relu_.default,
            aten.bernoulli.default,
            len,
        )
        with pytest.raises(UnsupportedOperatorError) as caught:
            check_operators(graph)
        assert str(caught.value) == (
            "4 operators have no placement:\n"
            "- gt_rules_test.unknown.default: no rule says how it may be sharded (node 'n1' in module 'layers.0.mlp')\n"
            "- aten.relu_.default: writes to its arguments; plan the form that returns its result (node 'n3' in module 'layers.0.mlp')\n"
            "- aten.bernoulli.default: draws random numbers, which differ with the placement (node 'n4' in module 'layers.0.mlp')\n"
            "- <built-in function len>: not an operator with a schema (node 'n5' in module 'layers.0.mlp')\n"
            "Teach the planner an operator with gt_autoparallel.register_rule(name, rule), or run it "
            "whole on every rank with replicate_unknown=[name]."
        )

    def test_names_an_operator_once_with_the_line_that_calls_it_first(self) -> None:
        unknown = torch.ops.gt_rules_test.unknown.default
        graph = self.graph(unknown, unknown, unknown)
        nodes = tuple(replace(n, line=f"model.py:{n.index}: 'f(x)'") for n in graph.nodes)
        with pytest.raises(UnsupportedOperatorError) as caught:
            check_operators(replace(graph, nodes=nodes))
        assert str(caught.value).splitlines()[:2] == [
            "an operator has no placement:",
            "- gt_rules_test.unknown.default: no rule says how it may be sharded (node 'n1' in module 'layers.0.mlp', at model.py:1: 'f(x)'; 3 nodes in all)",
        ]

    def test_names_the_one_operator_asked_for(self) -> None:
        target = torch.ops.gt_rules_test.unknown.default
        with pytest.raises(
            UnsupportedOperatorError,
            match=r"^an operator has no placement:\n- gt_rules_test.unknown.default: ",
        ):
            node_options(node(target, Value(0)), (spec(4, 4),), ONE)

    @pytest.mark.parametrize("name", ["gt_rules_test.unknown", "gt_rules_test.unknown.default"])
    def test_runs_what_is_opted_in_whole_and_says_so(self, name: str) -> None:
        graph = self.graph(torch.ops.gt_rules_test.unknown.default, aten.relu.default)
        check_operators(graph, replicate_unknown=[name])
        options = node_options(graph.nodes[1], (spec(4, 4),), TWO, replicate_unknown=[name])
        assert [option_text(option) for option in options] == ["R R -> R R"]
        assert [n.name for n in replicated_operators(graph, [name, "aten.relu"])] == ["n1"]

    def test_random_operators_run_whole_when_opted_in(self) -> None:
        random = node(aten.bernoulli.default, Value(0))
        options = node_options(random, (spec(4, 4),), ONE, replicate_unknown=["aten.bernoulli"])
        assert [option_text(option) for option in options] == ["R -> R"]

    def test_attention_is_random_only_with_dropout(self) -> None:
        name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        sample = next(s for s in SAMPLES if s.operator == name)
        placed, operands, _ = node_of(sample)
        specs = tuple(spec_of(operand) for operand in operands)
        assert len(node_options(placed, specs, ONE)) > 1
        dropping = node(placed.target, *placed.args[:3], 0.5, outputs=placed.outputs)
        with pytest.raises(UnsupportedOperatorError, match="draws random numbers"):
            node_options(dropping, specs, ONE)


class TestRegistering:
    def test_teaches_an_operator_and_replaces_what_was_said(self) -> None:
        sample = Sample(
            operator="gt_rules_test.gate.default",
            args=(ints(4, 2), ints(2)),
            kwargs={},
            exact=True,
            compared=None,
            stand_in=None,
        )

        def rows(call: OperatorCall) -> DimLabels:
            return DimLabels(operands=(("t", None), (None,)), outputs=(("t", None),))

        def everything(call: OperatorCall) -> DimLabels:
            return DimLabels(operands=(("t", "w"), ("w",)), outputs=(("t", "w"),))

        register_rule("gt_rules_test.gate", labelled(rows))
        assert texts(sample) == ["R, R -> R", "S(0), R -> S(0)"]
        register_rule(torch.ops.gt_rules_test.gate.default, labelled(everything))
        assert texts(sample) == ["R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> S(1)"]
        assert list(wrong_options(sample, TWO)) == []

    def test_refuses_a_name_without_namespace(self) -> None:
        with pytest.raises(ValueError, match=r"operator 'gate': allowed: an OpOverload, or a name"):
            register_rule("gate", labelled(lambda call: DimLabels(operands=(), outputs=())))

    def test_refuses_options_that_do_not_speak_of_the_call(self) -> None:
        target = torch.ops.gt_rules_test.unknown.default
        rule = labelled(lambda call: DimLabels(operands=((0,), (0,)), outputs=((0,),)))
        register_rule(target, rule)
        try:
            with pytest.raises(ValueError, match="gives an option with 2 operands") as caught:
                node_options(node(target, Value(0)), (spec(4, 4),), ONE)
        finally:
            forget_rule(target)
        assert str(caught.value) == (
            "the rule of gt_rules_test.unknown.default gives an option with 2 operands and outputs "
            "(Replicate(),); allowed: a placement for each of the 1 operands, and for each output "
            "one if it is a tensor, else None (tensors: (True,))"
        )

    def test_a_wrong_rule_does_not_pass_the_proof(self) -> None:
        sample = Sample(
            operator="gt_rules_test.unknown.default",
            args=(ints(4, 4),),
            kwargs={},
            exact=True,
            compared=None,
            stand_in=lambda x: x.cumsum(1),
        )
        register_rule(
            sample.operator, labelled(lambda call: DimLabels(operands=((0, 1),), outputs=((0, 1),)))
        )
        try:
            assert list(wrong_options(sample, ONE)) == [
                "gt_rules_test.unknown.default [S(1) -> S(1)] output 0: differs from the global result"
            ]
        finally:
            forget_rule(sample.operator)

    def test_no_operator_stands_in_two_families(self) -> None:
        names = [name for family in FAMILIES for name in family.RULES]
        assert sorted(set(names)) == sorted(names)
