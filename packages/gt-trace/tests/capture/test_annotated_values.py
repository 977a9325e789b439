"""Methods that annotations replace while a step is captured are compared as they are afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gt_config.node_keys import ModuleAnnotation
from gt_trace import StateMismatchError, trace_step
from gt_trace.annotate import annotate_method


class Inherits(nn.Linear):
    """Has its forward from its base."""


class Patched(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        forward = nn.Linear.forward
        self.forward = lambda x: forward(self, x) * 2


@pytest.mark.parametrize("make", [lambda: Inherits(4, 4), lambda: nn.Linear(4, 4), Patched])
def test_an_annotated_step_runs_when_annotations_are_gone(make) -> None:
    model = make()

    def step(x: Tensor) -> Tensor:
        return model(x).detach()

    x = torch.rand(3, 4)
    with annotate_method(model, "forward", ModuleAnnotation(fqn="model")):
        captured = trace_step(step, module=model)(x).bind(model)
    for _ in range(2):
        assert torch.equal(captured(x), step(x))
    model.forward = lambda x: x
    with pytest.raises(StateMismatchError, match="forward"):
        captured(x)
