"""A memory policy of one's own: what it keeps, where it runs, and what it may not be mixed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from memory_models import Captured, capture_decoder, capture_stack
from torch.fx import Node

from gt_config import CompileConfig
from gt_config.node_keys import ResidencyAnnotation
from gt_passes import (
    MemoryPolicyPass,
    RecipeError,
    default_passes,
    estimate_peak_bytes,
    optimize,
    register_pass,
    registry,
)
from gt_passes.memory_policy.saved_tensor_policy import EXPENSIVE_OPERATORS, is_one_of
from gt_trace import module_fqn
from gt_trace.node_metadata import read_annotation


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    register_pass(KeepOneLayer)
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOneLayer(MemoryPolicyPass):
    name: ClassVar[str] = "keep-one-layer"

    layer: str = "layers.0"

    def keeps(self, node: Node) -> bool:
        return module_fqn(node).startswith(self.layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAsSelective(MemoryPolicyPass):
    name: ClassVar[str] = "keep-as-selective"

    def keeps(self, node: Node) -> bool:
        return is_one_of(EXPENSIVE_OPERATORS)(node)


OWN = CompileConfig(passes=("keep-one-layer",))


def residencies(captured: Captured) -> dict[str, str]:
    found = (
        (node.name, read_annotation(node, ResidencyAnnotation))
        for node in captured.graph_module.graph.nodes
    )
    return {name: tag.residency for name, tag in found if tag is not None}


def test_what_it_keeps_is_saved_and_the_rest_of_the_layers_computed_again():
    captured = capture_stack()
    report = KeepOneLayer().run(captured.graph_module, captured.context)
    assert report.counts == {"tensors_save": 5, "tensors_recompute": 2}
    text = "\n".join(f"{name} {residency}" for name, residency in residencies(captured).items())
    assert_expected_inline(
        text,
        """\
mm save
silu save
mm_1 save
mm_2 recompute
silu_1 recompute
mm_3 save
ones_like save""",
    )


def test_a_second_run_says_nothing_new():
    captured = capture_stack()
    KeepOneLayer().run(captured.graph_module, captured.context)
    assert not KeepOneLayer().run(captured.graph_module, captured.context).changed


def test_a_policy_that_keeps_what_selective_keeps_is_selective():
    one, other = capture_decoder(), capture_decoder()
    optimize(one.step, CompileConfig(memory_policy="selective"))
    register_pass(KeepAsSelective)
    optimize(other.step, CompileConfig(passes=("keep-as-selective",)))
    assert residencies(one) == residencies(other)
    assert estimate_peak_bytes(one.graph_module) == estimate_peak_bytes(other.graph_module)


def test_the_recipe_runs_it_in_place_of_the_policy_and_carries_it_out():
    names = [each.name for each in default_passes(OWN, graph="STEP")]
    selective = CompileConfig(memory_policy="selective")
    expected = [each.name for each in default_passes(selective, graph="STEP")]
    assert names == ["keep-one-layer" if name == "tag-saved-tensors" else name for name in expected]
    assert "reshard-after-forward" in names


def test_the_gradients_keep_every_bit_for_less_memory():
    captured, saved = capture_decoder(dropout=0.1), capture_decoder(dropout=0.1)
    report = optimize(captured.step, OWN)
    optimize(saved.step)
    (recomputed,) = (each for each in report.records if each.name == "recompute-tagged")
    assert recomputed.report.counts["recomputed"] > 0
    assert estimate_peak_bytes(captured.graph_module) < estimate_peak_bytes(saved.graph_module)
    results = []
    for each in (captured, saved):
        torch.manual_seed(1)
        loss, gradients = each.step.bind(each.model)(*each.args)
        results.append((loss, *gradients))
    assert all(map(torch.equal, *results))


def test_a_graph_has_one_memory_policy():
    register_pass(KeepAsSelective)
    both = ("keep-one-layer", "keep-as-selective")
    options = CompileConfig(memory_policy="selective", passes=both)
    with pytest.raises(RecipeError) as error:
        default_passes(options, graph="STEP")
    assert str(error.value) == (
        "the recipe cannot be built:\n"
        "  - 'keep-one-layer' and 'keep-as-selective' and --compile.memory_policy selective "
        "are memory policies, and a graph has one"
    )
