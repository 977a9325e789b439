"""Steps that decide by the values of tensors; other impurities are in ``test_trace.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gt_trace import CaptureError, trace_step
from gt_trace.joint import export_joint_graph


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def branches_on_an_item(x: Tensor) -> Tensor:
    total = x.sum().item()
    return x if total > 0 else -x


def slices(x: Tensor) -> Tensor:
    return x[: int(x.sum())]


def compares(x: Tensor) -> Tensor:
    return x if torch.equal(x, x * 2) else -x


def counts(x: Tensor) -> Tensor:
    positive = x[x > 0]
    return positive if len(positive) > 3 else x


def leaves_torch(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.numpy())


DECIDING: dict[Callable[[Tensor], Tensor], str] = {
    branches: "return x if x.sum() > 0 else -x",
    branches_on_an_item: "return x if total > 0 else -x",
    slices: "return x[: int(x.sum())]",
    compares: "return x if torch.equal(x, x * 2) else -x",
    counts: "return positive if len(positive) > 3 else x",
    leaves_torch: "return x + torch.from_numpy(x.numpy())",
}


@pytest.mark.parametrize("decide", DECIDING, ids=lambda decide: decide.__name__)
def test_step_that_decides_by_a_value_is_refused_with_its_line(
    decide: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError) as error:
        trace_step(lambda x: decide(x) * 2)(torch.ones(4))
    first, file, line, advice = str(error.value).splitlines()
    assert first.startswith(
        "the step needs the value of a tensor while it is captured, when tensors have none ("
    )
    assert file.startswith(f'  File "{__file__}", line ')
    assert file.endswith(f"in {decide.__name__}")
    assert line.strip() == DECIDING[decide]
    assert advice == (
        "Python runs once, and what it decides is the same in every replay. Compute with tensors "
        "instead of branching, looping or indexing by their values (torch.where instead of if, a "
        "mask instead of a selection), return what is to be printed or logged, and decide outside "
        "of the step"
    )


def test_module_that_decides_by_a_value_is_refused_by_the_joint_export() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return branches(super().forward(x))

    with pytest.raises(CaptureError, match="in branches\n    return x if"):
        export_joint_graph(Deciding(2, 2), (torch.ones(1, 2),))


def test_value_that_only_operators_read_is_part_of_the_graph() -> None:
    bound = trace_step(lambda x: x / x.sum().item())(torch.ones(2)).bind()
    assert torch.equal(bound(torch.full((2,), 3.0)), torch.full((2,), 0.5))
