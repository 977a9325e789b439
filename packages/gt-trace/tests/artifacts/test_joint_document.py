"""Joint graphs through JSON: forward and backward, and what each of their values stands for."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joint_models import Chosen, Dropping, ManyNames, Tree
from torch import nn
from torch.utils import _pytree as pytree
from trace_models import TiedModel, batch

from gt_trace import graph_text
from gt_trace.artifacts.joint_document import JOINT_FORM
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactError
from gt_trace.joint import ForwardBackward, export_joint_graph, partition

CASES: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]]] = {
    "many names": lambda: (ManyNames(), (torch.rand(3),), {"scale": torch.tensor(2.0)}),
    "a tree": lambda: (Tree(), (torch.rand(2, 3),), {"name": "leaf"}),
    "tied weights and a buffer": lambda: (TiedModel(), (batch(0)[0],), {}),
    "random": lambda: (Dropping(), (torch.rand(4, 8),), {}),
    "sizes at run time": lambda: (Chosen(), (torch.randn(6, 4),), {}),
}


def parts_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], ForwardBackward]:
    torch.manual_seed(0)
    module, args, kwargs = CASES[name]()
    return module, args, kwargs, partition(export_joint_graph(module, args, kwargs))


def document_of(parts: ForwardBackward) -> Any:
    encoded = JOINT_FORM.encode(parts, MeshAxes.of())
    assert encoded.blobs == {}
    return json.loads(json.dumps(encoded.document))


def loaded(document: Any) -> ForwardBackward:
    return JOINT_FORM.decode(document, MeshAxes.of(), blob={}.__getitem__)


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_stored_comes_back_and_computes_the_same_bits(name: str) -> None:
    module, args, kwargs, parts = parts_of(name)
    document = document_of(parts)
    again = loaded(document)

    assert document_of(again) == document
    for field in ("forward", "backward"):
        assert graph_text(getattr(again, field)) == graph_text(getattr(parts, field))
    for field in (each for each in parts.__slots__ if each.endswith(("_inputs", "_results"))):
        assert getattr(again, field) == getattr(parts, field)
    assert graph_text(again.joint.graph_module) == graph_text(parts.joint.graph_module)
    for field in set(parts.joint.__slots__) | {"inputs", "state", "arguments", "argument_spec"}:
        if field not in ("graph_module", "example_inputs", "fake_mode"):
            assert getattr(again.joint, field) == getattr(parts.joint, field), field
    eager = copy.deepcopy(module)
    runs = [_run(each, args, kwargs) for each in (eager, again.bind(module))]
    assert all(map(torch.equal, *runs))
    gradients = [
        [p.grad for p in each.parameters() if p.grad is not None] for each in (eager, module)
    ]
    assert len(gradients[0]) > 0
    assert all(map(torch.equal, *gradients))


def _run(call: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    leaves = [x for x in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    sum(x.sum() for x in leaves if x.requires_grad).backward()
    return leaves


def test_descriptors_of_autograd_are_stored() -> None:
    *_, parts = parts_of("many names")
    again = loaded(document_of(parts))
    for ours, theirs in zip(parts.backward.graph.nodes, again.backward.graph.nodes, strict=True):
        assert ours.meta.get("desc") == theirs.meta.get("desc")
    output = again.backward.graph.output_node()
    assert [type(each).__name__ for each in output.meta["desc"]] == ["GradAOTOutput"] * 3


def _one_input_less(content: dict[str, Any]) -> None:
    content["forward"]["inputs"].pop()


def _renamed_saved_value(content: dict[str, Any]) -> None:
    saved = next(each for each in content["backward"]["inputs"] if each["kind"] == "saved")
    saved["name"] = "elsewhere"


def _unknown_result(content: dict[str, Any]) -> None:
    content["backward"]["results"][0][0] = "hessian"


def _gradient_of_nothing(content: dict[str, Any]) -> None:
    content["backward"]["results"][0][2] = "hyperparameter"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_one_input_less, "a graph takes and gives 8 and 7 values, and 7 and 7 are described"),
        (_renamed_saved_value, "the backward reads what the forward does not save: ['elsewhere']"),
        (_unknown_result, "a result of a graph is a 'hessian'"),
        (_gradient_of_nothing, "an input of a graph is a 'hyperparameter'"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    *_, parts = parts_of("many names")
    document = document_of(parts)
    damage(document["content"])
    with pytest.raises(ArtifactError) as refused:
        loaded(document)
    assert str(refused.value) == message
