"""What each policy tags, and what it never tags for recomputation."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from memory_models import Captured, Mlp, capture_decoder, capture_stack, run
from pass_graphs import program
from torch import nn
from torch.nn import functional as F

from gt_config import MemoryPolicy, SavedOpSelector
from gt_config.node_keys import ChunkAnnotation, ResidencyAnnotation
from gt_passes import CanonicalizeViews, RemoveDeadCode, TagSavedTensors
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.memory_policy.saved_tensor_policy import every_second_product
from gt_trace.node_metadata import read_annotation, write_annotation

TIDY = (RemoveDeadCode(), CanonicalizeViews())


def tags(captured: Captured) -> str:
    """The tag of every tagged node, in execution order."""
    found = (
        (node, read_annotation(node, ResidencyAnnotation))
        for node in captured.graph_module.graph.nodes
    )
    return "\n".join(f"{node.name} {tag.residency}" for node, tag in found if tag is not None)


def tagged(captured: Captured, policy: MemoryPolicy, **options: object) -> str:
    run(captured, *TIDY, TagSavedTensors(policy=policy, **options))
    return tags(captured)


class RandomResidual(nn.Module):
    """A layer that drops out, and adds noise."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noisy = F.dropout(x, 0.5) * torch.rand_like(x)
        return self.inner(noisy.sin())


@torch.library.custom_op("gt_test_memory::probe", mutates_args=())
def probe(x: torch.Tensor) -> torch.Tensor:
    """An operator of which nothing is known."""
    probe_calls.append(None)
    return x * 2


@probe.register_fake
def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


probe.register_autograd(lambda ctx, gradient: gradient * 2)
probe_calls: list[None] = []


class Probed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probed = probe(x.sin())
        return self.inner(probed.exp() * probed.cos())


class Counting(nn.Module):
    """A layer that reads a buffer, and writes to it afterwards."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(dim))
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.seen.cos()
        with torch.no_grad():
            self.seen.add_(1)
        return scaled.sin().exp() @ self.weight


def test_save_all_tags_nothing():
    captured = capture_stack()
    before = program(captured.graph_module)
    report = run(captured, TagSavedTensors())
    assert not report.records[0].report.changed
    assert (tags(captured), program(captured.graph_module)) == ("", before)


def test_selective_saves_what_is_expensive():
    captured = capture_stack()
    before = program(captured.graph_module)
    text = tagged(captured, "selective")
    assert_expected_inline(
        text,
        """\
mm save
silu recompute
mm_1 save
mm_2 save
silu_1 recompute
mm_3 save
ones_like save""",
    )
    assert program(captured.graph_module) == before


class GatedMlp(nn.Module):
    """A layer of three products, of which the first two are read inside it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(dim, dim)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


def test_selective_alternate_computes_every_second_product_of_a_layer_again():
    assert_expected_inline(
        tagged(capture_stack([GatedMlp(4), GatedMlp(4)]), "selective_alternate"),
        """\
mm save
silu recompute
mm_1 recompute
mul recompute
mm_2 save
mm_3 save
silu_1 recompute
mm_4 recompute
mul_1 recompute
mm_5 save
ones_like save""",
    )


def test_each_chunk_of_a_layer_computes_the_same_products_again():
    captured = capture_stack([GatedMlp(4)])
    nodes = [node for node in captured.graph_module.graph.nodes if node.name.startswith("mm")][:3]
    for chunk, node in enumerate(nodes[1:]):
        annotation = ChunkAnnotation(
            region_root="layers.0",
            role="body",
            chunk_id=chunk,
            direction="forward",
            producer="graph",
        )
        write_annotation(node, annotation)
    assert every_second_product(nodes, LayerNames("layers.*")) == set(nodes[1:])


def test_full_recompute_saves_what_enters_and_leaves_layers():
    assert_expected_inline(
        tagged(capture_stack(), "full_recompute"),
        """\
mm recompute
silu recompute
mm_1 save
mm_2 recompute
silu_1 recompute
mm_3 save
ones_like save""",
    )


def test_full_recompute_saves_what_a_selector_names():
    first_layer_only = (SavedOpSelector.parse("layers.0::aten.mm"),)
    assert_expected_inline(
        tagged(capture_stack(), "full_recompute", saved_ops=first_layer_only),
        """\
mm save
silu recompute
mm_1 save
mm_2 recompute
silu_1 recompute
mm_3 save
ones_like save""",
    )


def test_offload_tags_what_selective_saves_in_layers():
    assert_expected_inline(
        tagged(capture_stack(), "offload", offload_min_bytes=1),
        """\
mm offload
silu recompute
mm_1 offload
mm_2 offload
silu_1 recompute
mm_3 offload
ones_like save""",
    )


def test_offload_keeps_within_the_budget_and_takes_what_is_idle_for_longest():
    def offloaded(budget: int) -> list[str]:
        text = tagged(
            capture_stack([Mlp(4), Mlp(4), Mlp(4)]),
            "offload",
            host_budget_bytes=budget,
            offload_min_bytes=1,
        )
        return [line for line in text.splitlines() if line.endswith("offload")]

    assert offloaded(0) == []
    assert offloaded(8 * 8 * 4) == ["mm offload"]
    # The rest is too little for another mm of 256 bytes, and enough for an output of a layer.
    assert offloaded(8 * 8 * 4 + 8 * 4 * 4) == ["mm offload", "mm_1 offload"]


def test_offload_leaves_small_tensors_alone():
    assert "offload" not in tagged(capture_stack(), "offload", offload_min_bytes=257)


def test_layers_may_have_other_names():
    assert "recompute" not in tagged(capture_stack(), "selective", layers="blocks.*")
    assert "recompute" in tagged(capture_stack(), "selective", layers="lay*.1")


def test_a_step_without_a_backward_gets_no_tags():
    captured = capture_stack()
    graph_module = captured.graph_module
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = (output.args[0][:1],)
    graph_module.graph.eliminate_dead_code()
    report = TagSavedTensors(policy="full_recompute").run(graph_module, captured.context)
    assert (report.changed, dict(report.counts), tags(captured)) == (False, {}, "")


@pytest.mark.parametrize(
    "policy", ["selective", "selective_alternate", "full_recompute", "offload"]
)
def test_tagging_again_changes_nothing(policy: MemoryPolicy):
    captured = capture_decoder(dropout=0.1)
    first = tagged(captured, policy)
    report = run(captured, TagSavedTensors(policy=policy))
    assert not report.records[0].report.changed
    assert tags(captured) == first != ""


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        # What the dropout multiplies with, and the noise.
        (RandomResidual(Mlp(4)), ["bernoulli_", "rand_like"]),
        (Probed(Mlp(4)), ["probe"]),
    ],
    ids=["random", "unknown"],
)
def test_cannot_recompute_operators_that_are_not_pure(layer: nn.Module, kept: list[str]):
    captured = capture_stack([Mlp(4), layer])
    lines = tagged(captured, "full_recompute").splitlines()
    for name in kept:
        assert f"{name} save" in lines


def test_cannot_recompute_readers_of_memory_that_is_written_to_later():
    captured = capture_stack([Mlp(4), Counting(4)])
    lines = tagged(captured, "full_recompute").splitlines()
    assert "cos save" in lines  # of the buffer, before the count
    assert "mul recompute" in lines  # from the saved cosine


def test_chains_in_place_are_recomputed_as_a_whole():
    captured = capture_decoder(num_layers=1)
    lines = tagged(captured, "full_recompute").splitlines()
    assert {f"{name} recompute" for name in ("mean", "add_", "rsqrt")} <= set(lines)
