"""The check that a model's forward bears what a split does to it."""

from __future__ import annotations

import pytest
import torch
from split_models import Decoder, Nested
from torch import nn

from gt_pipeline.errors import NotSplittableError, StageNamesError
from gt_pipeline.split import RemovalPolicy, check_splittable

TOKENS = torch.arange(8).reshape(2, 4)
STAGES = [["embed", "layers.0"], ["layers.1", "norm", "head"]]
NESTED_STAGES = [["position", "towers.left"], ["towers.right", "dropout"]]


class Plain(nn.Module):
    """Calls its children without asking whether they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Indexing(Plain):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for index in range(2):
            hidden = self.layers[index](hidden)
        return self.head(hidden)


PLAIN_STAGES = [["embed", "layers.0"], ["layers.1", "head"]]


@pytest.mark.parametrize("dict_like", [True, False])
def test_a_forward_that_skips_what_is_none_passes(dict_like: bool):
    check_splittable(Decoder(2, dict_like=dict_like), STAGES, (TOKENS,))


def test_a_model_on_the_meta_device_is_checked_by_shapes():
    with torch.device("meta"):
        check_splittable(Decoder(2, width=4096), STAGES, (torch.zeros(2, 4, dtype=torch.long),))


def test_a_forward_that_calls_none_is_refused_and_passes_with_identity():
    with pytest.raises(NotSplittableError) as caught:
        check_splittable(Plain(), PLAIN_STAGES, (TOKENS,))
    assert str(caught.value) == (
        "Plain in 2 stages:\n"
        "  - stage 0 (embed, layers.0) fails on (int64[2, 4]): TypeError: 'NoneType' object is not "
        "callable\n"
        "  - what it lacks is replaced by RemovalPolicy(attribute='none', entry='delete'): use "
        "another one, or skip in forward"
    )
    check_splittable(Plain(), PLAIN_STAGES, (TOKENS,), policy=RemovalPolicy(attribute="identity"))


def test_a_forward_that_indexes_its_layers_is_refused_and_passes_with_identity_for_entries():
    policy = RemovalPolicy(attribute="identity")
    with pytest.raises(NotSplittableError, match="stage 0"):
        check_splittable(Indexing(), PLAIN_STAGES, (TOKENS,), policy=policy)
    policy = RemovalPolicy(attribute="identity", entry="identity")
    check_splittable(Indexing(), PLAIN_STAGES, (TOKENS,), policy=policy)


def test_a_forward_that_silently_computes_something_else_is_refused():
    class Residual(Plain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(tokens)
            skipped = hidden
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden + skipped)

    with pytest.raises(NotSplittableError) as caught:
        check_splittable(
            Residual(), PLAIN_STAGES, (TOKENS,), policy=RemovalPolicy(attribute="identity")
        )
    assert caught.value.problems == ("result of the last stage has other values than the model's",)


def test_stages_in_the_wrong_order_are_refused():
    with pytest.raises(NotSplittableError):
        check_splittable(Decoder(2), STAGES[::-1], (TOKENS,))


def test_random_numbers_and_buffers_do_not_disturb_the_check_and_are_left_alone():
    model = Nested()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    check_splittable(
        model,
        NESTED_STAGES,
        (torch.rand(2, 8, generator=torch.Generator()),),
        policy=RemovalPolicy(attribute=keep_dropout_out),
    )
    assert torch.equal(torch.rand(1), expected)
    assert model.seen.item() == 0


def keep_dropout_out(name: str, child: nn.Module) -> nn.Module | None:
    return nn.Identity() if name == "dropout" else None


def test_arguments_by_name_go_to_every_stage():
    class Scaled(Decoder):
        def forward(self, tokens: torch.Tensor, *, scale: float) -> torch.Tensor:
            return scale * super().forward(tokens)

    with pytest.raises(NotSplittableError, match="other values"):
        check_splittable(Scaled(2), STAGES, (TOKENS,), {"scale": 2.0})
    check_splittable(Scaled(2), STAGES, (TOKENS,), {"scale": 1.0})


def test_what_cannot_pass_from_stage_to_stage_is_refused():
    class Wrapped(Decoder):
        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"hidden": super().forward(tokens)}

    with pytest.raises(NotSplittableError) as caught:
        check_splittable(Wrapped(2), STAGES, (TOKENS,))
    assert caught.value.problems == (
        (
            "stage 0 (embed, layers.0) returns dict(hidden: float32[2, 4, 8]): only tensors pass "
            "between stages"
        ),
    )


def test_results_of_another_shape_or_structure_are_refused():
    class Final(Decoder):
        def forward(self, tokens: torch.Tensor) -> object:
            hidden = super().forward(tokens)
            if self.embed is None:
                return (hidden, hidden) if self.norm is None else hidden[0]
            return hidden

    with pytest.raises(NotSplittableError) as caught:
        check_splittable(Final(2), STAGES, (TOKENS,))
    assert caught.value.problems == (
        "result of the last stage is float32[4, 16], of the model float32[2, 4, 16]",
    )
    with pytest.raises(NotSplittableError) as caught:
        check_splittable(Final(2), [["embed", "layers", "norm"], ["head"]], (TOKENS,))
    assert caught.value.problems == (
        (
            "the last stage returns (float32[2, 4, 16], float32[2, 4, 16]), the model "
            "float32[2, 4, 16]"
        ),
    )


def test_results_that_are_nan_in_both_are_equal():
    model = Decoder(2)
    with torch.no_grad():
        model.embed.weight.fill_(float("nan"))
    check_splittable(model, STAGES, (TOKENS,))


def test_names_are_checked_before_anything_runs():
    with pytest.raises(StageNamesError):
        check_splittable(Decoder(2), [["embed"]], ("never used",))
