"""Modes and hooks that a stage's graphs do not have are refused; arguments go by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_models import ACTIVATION, WIDTH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gt_pipeline.errors import StageCaptureError, StageInputError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import ActivationSignature, MicrobatchInputs
from gt_trace import CaptureError, StateMismatchError

NOTHING = MicrobatchInputs()


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def middle(module: nn.Module, **options: Any) -> GraphPipelineStage:
    options = {"stage_index": 1, "num_stages": 3, "activations": [ACTIVATION], **options}
    return GraphPipelineStage(module, **options)


def test_hooks_of_parameters_are_refused_at_construction_by_name() -> None:
    module = model()
    module[0].weight.register_hook(lambda gradient: 2 * gradient)
    module[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(StageCaptureError) as caught:
        middle(module)
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "parameter 0.weight has a hook by register_hook",
        "parameter 0.bias has a hook by register_post_accumulate_grad_hook",
    ]


def test_hooks_that_come_later_and_changed_modes_are_refused_at_the_next_step() -> None:
    module = model()
    stage = middle(module)
    stage.forward(0, (rows(),), NOTHING)
    stage.discard()

    def refused(message: str) -> None:
        stage.discard()
        with pytest.raises(StateMismatchError, match=message):
            stage.forward(0, (rows(),), NOTHING)
        assert stage.num_saved == 0

    handle = module[0].register_forward_hook(lambda *_: None)
    refused("module 0 has 1 hooks, and had 0")
    handle.remove()
    handle = module[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    refused("parameter 0.bias has a hook by register_post_accumulate_grad_hook")
    handle.remove()
    module[1].eval()
    refused("module 1 is in evaluation mode, and was in training mode")
    module[1].train()
    module[0].bias.requires_grad_(False)
    refused(r"parameter 0\.bias requires no gradient, and did")
    module[0].bias.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        refused("autocast is on for cpu")
    stage.forward(0, (rows(),), NOTHING)


def test_a_backward_outside_of_the_captures_autocast_is_the_same() -> None:
    module, x, gradient = nn.Linear(WIDTH, WIDTH), rows(), rows().bfloat16()
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        stage = middle(module)
        for number in range(2):
            (output,) = stage.forward(number, (x,), NOTHING)
        found.append(stage.full_backward(0, (gradient,))[0])
        expected = module(x)
    found.append(stage.full_backward(1, (gradient,))[0])
    assert torch.equal(output, expected)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        eager = module(x)
    eager.backward(gradient)
    assert all(torch.equal(each, x.grad) for each in found)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_a_recurrent_stage_has_the_gradients_of_eager() -> None:
    module, x, gradient = Recurrent(), torch.randn(3, 2, WIDTH), torch.randn(3, 2, WIDTH)
    signature = ActivationSignature(shape=(3, 2, WIDTH), dtype=torch.float32, requires_grad=True)
    stage = middle(module, activations=[signature])
    with torch.no_grad():
        (output,) = stage.forward(0, (x,), NOTHING)
        (found,) = stage.full_backward(0, (gradient,))
    x.requires_grad_()
    eager = module(x)
    assert torch.equal(output, eager)
    assert torch.equal(found, torch.autograd.grad(eager, x, gradient)[0])


class Placing(nn.Module):
    def forward(self, x: Tensor, *, placed: Tensor, factor: Tensor) -> Tensor:
        return x * factor.view(-1) + placed.as_strided((1,), (1,), 1)


def test_a_microbatch_of_other_strides_is_copied_or_refused_if_its_memory_is_read() -> None:
    placed, factor, x = torch.randn(2, 3), torch.ones(2, WIDTH // 2, dtype=torch.long), rows()
    stage = middle(Placing(), inputs=MicrobatchInputs(kwargs={"placed": placed, "factor": factor}))
    part = torch.arange(2 * WIDTH).view(2, WIDTH)[:, : WIDTH // 2]
    given = MicrobatchInputs(kwargs={"placed": placed, "factor": part})
    (output,) = stage.forward(0, (x,), given)
    assert torch.equal(output, x * part.reshape(-1) + placed[0, 1])
    stage.discard()
    given = MicrobatchInputs(kwargs={"placed": torch.zeros(3, 2).t(), "factor": factor})
    with pytest.raises(StageInputError, match=r"placed'\]: strides \[1, 2\], .*by as_strided;"):
        stage.forward(0, (x,), given)


def test_evaluation_follows_the_mode_of_every_part_and_autocast() -> None:
    module = model()
    stage = middle(module)
    x = rows()
    module[1].eval()
    (found,) = stage.evaluate(0, (x,), NOTHING)
    with torch.no_grad():
        assert torch.equal(found, module(x))
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = stage.evaluate(0, (x,), NOTHING)
        with torch.no_grad():
            assert torch.equal(found, module(x))
    assert found.dtype is torch.bfloat16


def test_checkpointed_dropout_is_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).relu()

    with pytest.raises(CaptureError, match="draws random numbers again that the forward drew"):
        middle(Checkpointed())


class Scaling(nn.Module):
    def forward(self, x: Tensor, *, scales: dict[str, Tensor]) -> Tensor:
        return (x + scales["shift"]) * scales["factor"]


def inputs(*names: str) -> MicrobatchInputs:
    values = {"shift": torch.full((), 1.0), "factor": torch.full((), 3.0), "other": torch.ones(())}
    return MicrobatchInputs(kwargs={"scales": {name: values[name] for name in names}})


def test_a_dictionary_may_be_filled_in_any_order_and_has_the_captured_keys() -> None:
    stage = middle(Scaling(), inputs=inputs("shift", "factor"))
    x = rows()
    for number, names in enumerate((("shift", "factor"), ("factor", "shift"))):
        (found,) = stage.forward(number, (x,), inputs(*names))
        assert torch.equal(found, (x + 1) * 3)
    with pytest.raises(StageInputError) as caught:
        stage.forward(2, (x,), inputs("shift", "other"))
    assert caught.value.problems == (
        "kwargs['scales']['factor']: missing",
        "kwargs['scales']['other']: not captured",
    )


def test_a_slice_of_booleans_is_read_like_a_contiguous_one_and_one_of_numbers_refused() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x * mask.reshape(-1)[:WIDTH]

    numbers = torch.randn(4, 2 * WIDTH)
    for masks in (numbers > 0, numbers):
        stage = middle(Flat(), inputs=MicrobatchInputs(kwargs={"mask": masks[:, :WIDTH].clone()}))
        x, mask = rows(), masks[:, WIDTH:]
        given = MicrobatchInputs(kwargs={"mask": mask})
        if masks is numbers:
            with pytest.raises(StageInputError, match="sums over such memory may round otherwise"):
                stage.forward(0, (x,), given)
        else:
            assert torch.equal(stage.forward(0, (x,), given)[0], Flat()(x, mask=mask))


def test_a_subclass_in_place_of_a_plain_tensor_is_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    stage = middle(Scaling(), inputs=inputs("shift", "factor"))
    given = inputs("shift", "factor")
    given.kwargs["scales"]["shift"] = TwoTensor(torch.ones(()), torch.ones(()))
    with pytest.raises(StageInputError, match=r"TwoTensor torch\.float32 \[\], captured as torch"):
        stage.forward(0, (rows(),), given)


class Masked(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * scale if mask is None else x * scale * mask


def test_an_argument_that_the_capture_had_not_is_refused_where_the_module_takes_it() -> None:
    given = {"scale": torch.ones(())}
    stage = middle(Masked(), inputs=MicrobatchInputs(kwargs=given))
    assert stage.known_kwargs == {"x", "scale", "mask"}
    others = {**given, "mask": None, "for_another_stage": 3}
    stage.forward(0, (rows(),), MicrobatchInputs(kwargs=others))
    message = r"kwargs\['mask'\] was not given when it was captured, and the graph would ignore it"
    with pytest.raises(StageInputError, match=message):
        stage.forward(1, (rows(),), MicrobatchInputs(kwargs={**given, "mask": torch.ones(8)}))


def test_a_module_that_takes_any_kwarg_says_so() -> None:
    class Taking(nn.Module):
        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return x * others["scale"]

    stage = middle(Taking(), inputs=MicrobatchInputs(kwargs={"scale": torch.ones(())}))
    assert stage.known_kwargs is None
