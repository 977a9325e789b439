"""What a stored graph claims of shapes is for the verifier to find out: reading it runs nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from gt_passes import Verifier
from gt_trace import trace_step
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.step_document import STEP_FORM
from gt_trace.errors import ArtifactError


def stored() -> tuple[Any, list[int]]:
    """A document of a small step, and the facts of values that its operators compute."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    traced = trace_step(step, module=model)(torch.ones(3, 4))
    document = json.loads(json.dumps(STEP_FORM.encode(traced, MeshAxes.of()).document))
    computed = {
        value[1]
        for op, *_, meta in document["content"]["graph"]["nodes"]
        for key, value in meta
        if op == "c" and key == "val" and value[0] == "T"
    }
    return document, sorted(computed)


def problems_of(document: Any) -> int:
    """How many problems the verifier finds in a document's graph; one if it cannot be read."""
    try:
        step = STEP_FORM.decode(document, MeshAxes.of(), blob=lambda name: b"")
    except ArtifactError:
        return 1
    return len(Verifier().verify(step.graph_module).problems)


def test_an_honest_document_has_no_problems() -> None:
    assert problems_of(stored()[0]) == 0


_DTYPE, _SHAPE, _STRIDE = 1, 3, 4


@pytest.mark.parametrize("field", [_DTYPE, _SHAPE, _STRIDE], ids=["dtype", "shape", "stride"])
def test_every_lie_about_what_an_operator_gives_is_found(field: int) -> None:
    document, computed = stored()
    text = json.dumps(document)
    lies = 0
    for position in computed:
        lying = json.loads(text)
        fact = lying["values"][position]
        if field == _DTYPE:
            fact[field] = ["dt", "float16"]
        elif len(fact[field]) > 1:
            fact[field][1] += 1
        else:
            continue  # a scalar has neither sizes nor strides
        lies += 1
        assert problems_of(lying), f"nothing was found of {fact}"
    assert lies > 5
