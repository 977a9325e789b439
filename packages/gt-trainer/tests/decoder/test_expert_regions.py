"""Annotations of experts and chunks come off a model again, whatever goes wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchtitan.models.common.moe import RoutedExperts

from gt_config import EpOverlapConfig
from gt_passes.errors import ChunkMetadataError
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.decoder.expert_regions import annotate_expert_regions
from gt_trainer.startup import StartupClock
from gt_trainer.steps import captured_step
from gt_trainer.steps.captured_step import whole_step
from gt_trainer.steps.program import TracingOptions, capture_program


class Dispatcher:
    def dispatch(self, x):
        return x

    combine = dispatch


class Experts(RoutedExperts):
    """Routed experts without weights."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        nn.Module.__init__(self)
        self.inner_experts = nn.Identity()
        self.token_dispatcher = dispatcher


class Moe(nn.Module):
    def forward(self, x_BLD):
        return x_BLD


def model_of(moe: nn.Module) -> nn.Module:
    block = nn.ModuleDict({"moe": moe})
    return nn.ModuleDict({"layers": nn.ModuleDict({"0": block})})


def test_methods_are_annotated_and_left_as_they_were():
    experts = Experts(Dispatcher())
    inner = type(experts.inner_experts)
    before = Dispatcher.dispatch, Dispatcher.combine, inner.forward
    handle = annotate_expert_regions(nn.ModuleList([experts]))
    during = Dispatcher.dispatch, Dispatcher.combine, inner.forward
    assert all(now is not was for now, was in zip(during, before, strict=True))
    handle.undo()
    assert (Dispatcher.dispatch, Dispatcher.combine, inner.forward) == before
    assert not vars(experts.token_dispatcher)


def test_an_annotation_that_fails_takes_the_others_off():
    strange = Dispatcher()
    strange.combine = None
    model = nn.ModuleList([Experts(Dispatcher()), Experts(strange)])
    with pytest.raises(AttributeError, match="no method 'combine' to annotate"):
        annotate_expert_regions(model)
    assert not hasattr(Dispatcher.dispatch, "__wrapped__")
    assert not hasattr(type(model[0].inner_experts).forward, "__wrapped__")


OVERLAP = EpOverlapConfig(
    enabled=True, strategy="eager", module_fqn="layers.*.moe", chunk_dim="batch"
)


def test_a_capture_that_fails_at_the_experts_leaves_no_chunks(monkeypatch: pytest.MonkeyPatch):
    def fails(model):
        raise AttributeError("of the experts")

    monkeypatch.setattr(captured_step, "annotate_expert_regions", fails)
    model = model_of(Moe())
    with pytest.raises(AttributeError, match=r"^of the experts$"):
        capture_program(
            whole_step(model, None, options=TracingOptions(ep_overlap=OVERLAP)),
            recipe=None,
            clock=StartupClock(),
        )
    assert "forward" not in vars(model["layers"]["0"]["moe"])


def test_the_modules_in_chunks_are_known():
    model = model_of(Moe())
    with chunked_for_capture(model, OVERLAP) as chunked:
        assert chunked is not None
        assert chunked.roots == ("layers.0.moe",)
    with chunked_for_capture(model, EpOverlapConfig()) as chunked:
        assert chunked is None


def test_a_module_in_chunks_that_nobody_calls_is_an_error():
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model_of(Moe())["layers"]
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, inputs):
            return inputs * self.weight

    def loss_fn(prediction, labels, global_valid_tokens):
        return (prediction - labels).sum() / global_valid_tokens, {}

    batch = (torch.ones(2, 2), torch.ones(2, 2), torch.tensor(4.0), {})
    with pytest.raises(ChunkMetadataError, match=r"layers\.0\.moe: it was to run in chunks"):
        capture_program(
            whole_step(Passes(), loss_fn, *batch, options=TracingOptions(ep_overlap=OVERLAP)),
            recipe=None,
            clock=StartupClock(),
        )
