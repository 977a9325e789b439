"""What stages can pass on: losses and gradients are those of the whole model in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from stage_models import ACTIVATION, ROWS, WIDTH
from torch import Tensor, nn

from gt_pipeline.errors import RunnerSetupError, StageCaptureError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs
from gt_pipeline.schedules import schedule_of

NUM_MICROBATCHES = 2
Function = Callable[..., Any]


class Part(nn.Module):
    """A stage that applies a function to itself and to what it is given."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def twice(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = part.a(x)
    return hidden, hidden


def use_both(part: Part, x: Tensor, y: Tensor) -> Tensor:
    return part.a(x) * y


CASES: dict[str, tuple[Function, Function, Function]] = {
    "one tensor twice": (twice, use_both, lambda s, x: s.a(x)),
    "one tensor three times, used often": (
        lambda s, x: (*twice(s, x), s.b(x), x)[:1] * 3,
        lambda s, x, y, z: (s.a(y) * x + z.exp() * s.b(x)) * y,
        lambda s, x: s.a(x),
    ),
    "one tensor twice, passed on": (twice, lambda s, x, y: (s.a(x), y), use_both),
    "one tensor twice, of which one is used": (twice, lambda s, x, y: s.a(y), lambda s, x: s.a(x)),
    "for a later stage only": (
        lambda s, x: (s.a(x), s.b(x)),
        lambda s, x, y: (s.a(x), y),
        use_both,
    ),
    "a parameter and a view of it": (
        lambda s, x: (s.a(x), s.scale, s.scale.t()),
        lambda s, x, y, z: s.a(x) * y + z.t(),
        lambda s, x: s.a(x),
    ),
    "integers and detached, in a nested tuple": (
        lambda s, x: (s.a(x), (s.b(x).argmax(-1), s.b(x).detach())),
        lambda s, x, y, z: s.a(x) * y[:, None] + z,
        lambda s, x: s.a(x),
    ),
    "complex": (
        lambda s, x: torch.complex(s.a(x), s.b(x)),
        lambda s, x: x.exp(),
        lambda s, x: s.a(x.abs()),
    ),
}


def modules(functions: Sequence[Function]) -> list[Part]:
    torch.manual_seed(0)
    return [Part(function) for function in functions]


def pipeline_of(parts: Sequence[Part], x: Tensor, target: Tensor) -> GraphPPRunner:
    inputs = MicrobatchInputs(args=(x[:ROWS],), target=target[:ROWS])
    stages: list[GraphPipelineStage] = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        stages.append(
            GraphPipelineStage(
                part,
                stage_index=index,
                num_stages=len(parts),
                activations=stages[-1].output_signature if stages else (),
                inputs=inputs,
                loss_fn=loss_of if last else None,
                fake_mode=stages[0].fake_mode if stages else None,
            )
        )
    schedule = schedule_of(
        "Interleaved1F1B",
        num_ranks=1,
        num_stages=len(parts),
        num_microbatches=NUM_MICROBATCHES,
    )
    return GraphPPRunner(stages, schedule)


def gradients(parts: Sequence[Part]) -> list[Tensor | None]:
    found = [parameter.grad for part in parts for parameter in part.parameters()]
    for part in parts:
        part.zero_grad()
    return found


def train_whole(parts: Sequence[Part], x: Tensor, target: Tensor) -> list[Tensor]:
    losses = []
    for inputs, wanted in zip(x.split(ROWS), target.split(ROWS), strict=True):
        values: Any = inputs
        for part in parts:
            leaves = torch.utils._pytree.tree_leaves(values)
            values = part(*leaves)
        loss = loss_of(values, wanted)
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_computes_what_the_whole_model_does(name: str) -> None:
    parts = modules(CASES[name])
    x, target = torch.randn(2, NUM_MICROBATCHES * ROWS, WIDTH)
    expected = [*train_whole(parts, x, target), *gradients(parts)]
    found = [*pipeline_of(parts, x, target).step(x, target=target).losses, *gradients(parts)]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_a_gradient_made_contiguous_by_a_hook_is_that_of_the_whole_model() -> None:
    def transposing(part: Part, x: Tensor) -> Tensor:
        x.register_hook(torch.Tensor.contiguous)
        return part.a((x.t() * part.scale.t()).t().contiguous())

    parts = modules([lambda s, x: nn.functional.gelu(s.a(x)), transposing, lambda s, x: s.a(x)])
    x, target = torch.randn(2, NUM_MICROBATCHES * ROWS, WIDTH)
    expected = [*train_whole(parts, x, target), *gradients(parts)]
    found = [*pipeline_of(parts, x, target).step(x, target=target).losses, *gradients(parts)]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is None or torch.equal(mine, theirs)


def captured(function: Function, *activations: ActivationSignature) -> GraphPipelineStage:
    return GraphPipelineStage(
        Part(function), stage_index=1, num_stages=3, activations=activations or (ACTIVATION,)
    )


def test_an_output_that_travels_in_other_strides_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gt_pipeline"):
        captured(lambda s, x: s.a(x).t())
        captured(lambda s, x: s.a(x))
    (record,) = caplog.records
    assert "a stage returns outputs[0] with strides (1, 8). Tensors travel contiguous" in (
        record.getMessage()
    )


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda s, x: {"hidden": s.a(x)}, "dict"),
        (lambda s, x: (s.a(x), {"hidden": s.a(x)}), "dict"),
        (lambda s, x: (s.a(x), None), "NoneType"),
        (lambda s, x: (s.a(x), 3), "int"),
        (lambda s, x: {1}, "set"),
    ],
)
def test_what_is_no_tensor_between_stages_is_refused(function: Function, kind: str) -> None:
    with pytest.raises(StageCaptureError) as error:
        captured(function)
    assert str(error.value) == (
        f"stage 1 cannot be captured:\n  - it returns a {kind}; return tensors, alone or in tuples"
    )


@pytest.mark.parametrize("function", [lambda s, x, y: s.a(x), lambda s, x, y: s.a(x) + y.detach()])
def test_an_activation_that_gets_no_gradient_is_refused(function: Function) -> None:
    with pytest.raises(StageCaptureError) as error:
        captured(function, ACTIVATION, ACTIVATION)
    assert str(error.value) == (
        "stage 1 cannot be captured:\n"
        "  - no gradient reaches activations[1], which requires one. The stage before would get "
        "zeros, and parameters behind it would move where eager execution leaves their gradient "
        "None; return it detached from stage 0, or use it"
    )


def test_a_stage_that_does_not_know_of_a_repetition_is_refused() -> None:
    parts = modules(CASES["one tensor twice"][:2])
    inputs = MicrobatchInputs(args=(torch.randn(ROWS, WIDTH),), target=torch.randn(ROWS, WIDTH))
    first = GraphPipelineStage(parts[0], stage_index=0, num_stages=2, inputs=inputs)
    last = GraphPipelineStage(
        parts[1],
        stage_index=1,
        num_stages=2,
        activations=(ACTIVATION, ACTIVATION),
        inputs=inputs,
        loss_fn=loss_of,
    )
    schedule = schedule_of("Interleaved1F1B", num_ranks=1, num_stages=2, num_microbatches=2)
    message = r"float32\[4, 8\] without gradient, the same tensor as 0\), stage 1 takes"
    with pytest.raises(RunnerSetupError, match=message):
        GraphPPRunner([first, last], schedule)
