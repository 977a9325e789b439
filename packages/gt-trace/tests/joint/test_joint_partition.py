"""Where a joint graph is cut, and what is kept in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from fsdp_cases import Language
from joint_models import Chosen, Dropping, Gelu
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from trace_models import TiedModel, batch

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_trace import collective_counts, graph_text, phase_of, read_annotation
from gt_trace.fsdp import shard
from gt_trace.joint import ForwardBackward, export_joint_graph, partition
from gt_trace.testing import fake_world

PARTITIONERS = ("min_cut", "save_all")


def operators(graph_module: GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "call_function")


def saved_names(parts: ForwardBackward) -> list[str]:
    return [result.name for result in parts.forward_results if result.kind == "saved"]


def saved_bytes(parts: ForwardBackward) -> int:
    """Of what is kept besides parameters and arguments, which are there anyway."""
    values = [
        node.meta["val"]
        for node, result in zip(
            parts.forward.graph.output_node().args[0], parts.forward_results, strict=True
        )
        if result.kind == "saved" and node.op != "placeholder"
    ]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def test_the_cut_names_what_is_saved() -> None:
    parts = partition(export_joint_graph(Gelu(), (torch.rand(2, 4),)), partitioner="save_all")
    assert_expected_inline(
        graph_text(parts.forward) + graph_text(parts.backward),
        """\
input p_linear_weight: f32[3, 4]
input a_x: f32[2, 4]
# forward linear
    t: f32[4, 3] = aten.t.default(p_linear_weight)
    mm: f32[2, 3] = aten.mm.default(a_x, t)
# forward
    gelu: f32[2, 3] = aten.gelu.default(mm)
return (gelu, a_x, mm)
input s_argument_x: f32[2, 4]
input s_mm: f32[2, 3]
input t_output: f32[2, 3]
# backward
    gelu_backward: f32[2, 3] = aten.gelu_backward.default(t_output, s_mm)
# backward linear
    t_1: f32[3, 2] = aten.t.default(gelu_backward)
    mm_1: f32[3, 4] = aten.mm.default(t_1, s_argument_x)
    t_2: f32[4, 3] = aten.t.default(mm_1)
    t_3: f32[3, 4] = aten.t.default(t_2)
return (t_3)
""",
    )
    assert saved_names(parts) == ["argument x", "mm"]


def test_save_all_repeats_nothing_and_min_cut_keeps_less() -> None:
    joint = export_joint_graph(TiedModel(), (batch(1)[0],))
    everything = operators(joint.graph_module)
    save_all = partition(joint, partitioner="save_all")
    assert operators(save_all.forward) + operators(save_all.backward) == everything
    min_cut = partition(joint, partitioner="min_cut")
    repeated = operators(min_cut.forward) + operators(min_cut.backward) - everything
    assert repeated
    assert not any(".mm." in name or ".addmm." in name for name in repeated)
    assert 0 < saved_bytes(min_cut) < saved_bytes(save_all)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_the_joint_graph_stays_as_it_is(partitioner: str) -> None:
    joint = export_joint_graph(TiedModel(), (batch(1)[0],))
    before = graph_text(joint.graph_module)
    first = partition(joint, partitioner=partitioner)
    assert graph_text(joint.graph_module) == before
    assert graph_text(partition(joint, partitioner=partitioner).backward) == graph_text(
        first.backward
    )


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_every_node_has_the_phase_of_its_graph_and_a_fake_value(partitioner: str) -> None:
    parts = partition(export_joint_graph(TiedModel(), (batch(1)[0],)), partitioner=partitioner)
    for phase, graph_module in (("forward", parts.forward), ("backward", parts.backward)):
        for node in graph_module.graph.nodes:
            assert node.op == "output" or "val" in node.meta
            assert node.op != "call_function" or phase_of(node) == phase


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_random_operators_are_never_repeated(partitioner: str) -> None:
    joint = export_joint_graph(Dropping(), (torch.rand(4, 8),))
    parts = partition(joint, partitioner=partitioner)
    random = {n for n in operators(parts.forward) if "dropout" in n or "bernoulli" in n}
    assert random
    assert not random & operators(parts.backward).keys()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_sizes_that_depend_on_data_are_saved_apart_from_tensors(partitioner: str) -> None:
    joint = export_joint_graph(Chosen(), (torch.randn(6, 4),))
    parts = partition(joint, partitioner=partitioner)
    values = [n.meta["val"] for n in parts.backward.graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in values)


def test_refuses_unknown_choices() -> None:
    joint = export_joint_graph(Gelu(), (torch.rand(2, 4),))
    with pytest.raises(ValueError, match="partitioner is 'best'; allowed: 'min_cut', 'save_all'"):
        partition(joint, partitioner="best")
    with pytest.raises(ValueError, match="is 'drop'; allowed: 'save', 'gather_again', None"):
        partition(joint, gathered_parameters="drop")


class TestSharded:
    """Parameters sharded over four ranks, seen from one."""

    @pytest.fixture(autouse=True)
    def _world_of_four(self) -> Iterator[None]:
        with fake_world(rank=1, world_size=4):
            yield

    def parts(self, **choices: str) -> ForwardBackward:
        model = Language(tied=False)
        shard(model, init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)), mode="shard")
        joint = export_joint_graph(model, (torch.zeros(2, 5, dtype=torch.int64),))
        return partition(joint, **choices)

    @pytest.mark.parametrize("partitioner", PARTITIONERS)
    def test_saved_parameters_are_gathered_once(self, partitioner: str) -> None:
        parts = self.parts(partitioner=partitioner, gathered_parameters="save")
        assert collective_counts(parts.forward) == {"all_gather_into_tensor": 16}
        assert collective_counts(parts.backward) == {"reduce_scatter_tensor": 16}

    @pytest.mark.parametrize("partitioner", PARTITIONERS)
    def test_parameters_gathered_again_leave_only_shards_behind(self, partitioner: str) -> None:
        parts = self.parts(partitioner=partitioner, gathered_parameters="gather_again")
        # What the backward reads: all but the embedding and the biases of linear layers.
        assert collective_counts(parts.backward) == {
            "all_gather_into_tensor": 11,
            "reduce_scatter_tensor": 16,
        }
        whole = {
            node.name
            for node in parts.forward.graph.nodes
            if read_annotation(node, FsdpCollectiveAnnotation) is not None
        }
        assert whole
        assert not whole & set(saved_names(parts))
        # Nor a view of one, which would keep it alive.
        assert not any(name.startswith("t") for name in saved_names(parts))

    def test_by_default_only_min_cut_gathers_again(self) -> None:
        again = collective_counts(self.parts(partitioner="min_cut").backward)
        assert again["all_gather_into_tensor"] == 11
        once = collective_counts(self.parts(partitioner="save_all").backward)
        assert "all_gather_into_tensor" not in once

    def test_collectives_in_the_backward_say_what_they_are(self) -> None:
        parts = self.parts(partitioner="min_cut")
        kinds = Counter(
            (found.kind, str(node.target).split(".")[1])
            for node in parts.backward.graph.nodes
            if "c10d" in str(node.target)
            and (found := read_annotation(node, FsdpCollectiveAnnotation)) is not None
        )
        assert kinds == {
            ("unshard", "all_gather_into_tensor"): 11,
            ("unshard", "wait_tensor"): 11,
            ("reduce_grad", "reduce_scatter_tensor"): 16,
            ("reduce_grad", "wait_tensor"): 16,
        }
