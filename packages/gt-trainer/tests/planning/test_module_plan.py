"""Plans for a module that is nobody's decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gt_autoparallel import MeshShape
from gt_pipeline.split import LayerNaming
from gt_trainer.planning.candidates import MEMORY_POLICIES, NoRecipeError
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.module_plan import ModulePlan, plan_module
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.staged_module import ModuleStages

CLUSTER = load_cluster("h100_sxm")
WIDTH = 64
WIDE = 2048
"""So that products take the time."""


class Model(nn.Module):
    """Two layers, of which the first has a weight that is not trained, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = self.head
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(F.layer_norm(hidden, (WIDTH,)))
        return self.head(hidden) + self.tied(hidden)


def loss(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return model(hidden).square().mean()


def planned(cluster=CLUSTER, **options) -> ModulePlan:
    inputs = [torch.zeros(8, 16, WIDTH)]
    options = {"num_gpus": 4, "layers": "blocks.*", **options}
    model = Model()
    model.register_forward_hook(lambda module, arguments, output: 2 * output)
    return plan_module(model, loss, inputs, cluster, **options)


@pytest.fixture(scope="module")
def plan() -> ModulePlan:
    return planned(tokens_per_sample=16, num_microbatches=2, tensor_parallel=(2, 2))


def by_hand(plan: ModulePlan) -> list[RecipeOutcome]:
    """Without a solver."""
    return [each for each in plan.outcomes if each.recipe.tp == 1]


def test_every_sharding_is_simulated_with_every_policy(plan: ModulePlan):
    found = [(each.recipe.dp_shard, each.recipe.memory_policy) for each in by_hand(plan)]
    assert found == [(shard, policy) for shard in (1, 4) for policy in MEMORY_POLICIES]
    assert [each.step_us for each in plan.ranked] == sorted(e.step_us for e in plan.outcomes)
    for each in plan.outcomes:
        assert each.tokens_per_second_per_gpu == pytest.approx(2e6 * 8 * 16 / each.step_us)
        assert sum(each.memory.values()) == each.peak_bytes


def test_states_are_those_of_what_is_trained_once_and_shared(plan: ModulePlan):
    trained = 2 * (4 * WIDTH * WIDTH * 2 + WIDTH) + 4 * WIDTH + WIDTH * WIDTH
    for each in by_hand(plan):
        # Adam's, in float32.
        assert each.memory["optimizer state"] == 2 * 4 * trained / each.recipe.dp_shard


def test_recomputing_holds_less_and_multiplies_no_less(plan: ModulePlan):
    by = {(e.recipe.dp_shard, e.recipe.memory_policy): e for e in by_hand(plan)}
    least, most = by[4, "full_recompute"], by[4, "save_all"]
    assert least.memory["activations"] < most.memory["activations"]
    assert least.computing_us > most.computing_us
    assert least.mfu < most.mfu


def test_the_answer_says_what_was_simulated_and_what_binds(plan: ModulePlan):
    text = str(plan)
    assert text.startswith("Plan for 4 H100 SXM: simulated, nothing here was measured\n")
    assert "9 simulated, of which 0 do not fit; 0 without room" in text
    assert "  binds            " in text
    assert "  second           " in text


def test_recipes_without_room_for_their_states_are_not_captured():
    state_bytes = 4 * 4 * sum(p.numel() for p in Model().parameters())
    hardware = replace(CLUSTER.hardware, hbm_capacity_bytes=state_bytes // 2)
    found = planned(replace(CLUSTER, hardware=hardware))
    assert {each.dp_shard for each in found.without_memory} == {1}
    assert {each.recipe.dp_shard for each in found.outcomes} == {4}
    tiny = replace(hardware, hbm_capacity_bytes=100)
    with pytest.raises(NoRecipeError, match="and 4 GPUs have"):
        planned(replace(CLUSTER, hardware=tiny))


def test_a_solver_places_the_module_for_each_degree_of_tensor_parallelism(plan: ModulePlan):
    ((recipe, placement),) = plan.placements.items()
    assert (recipe.dp_shard, recipe.tp, recipe.microbatch) == (2, 2, 16)
    assert placement.mesh == MeshShape(names=("data", "model"), sizes=(2, 2))
    assert {name.partition(".")[0] for name in placement.parameter_layouts()} == {"module"}
    (placed,) = (each for each in plan.outcomes if each.recipe == recipe)
    # As many samples on as many GPUs, and as much work: what is simulated can be ranked together.
    like = next(each for each in by_hand(plan) if each.recipe.dp_shard == 4)
    assert placed.tokens_per_second_per_gpu * placed.step_us == pytest.approx(
        like.tokens_per_second_per_gpu * like.step_us
    )
    assert placed.computing_us == pytest.approx(like.computing_us, rel=0.2)
    assert "\n  tp 2             placed by a solver, which expects " in str(plan)
    assert not plan.left_out


class Chain(nn.Module):
    """Four layers and a head, which may stand in different stages; the first is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE)) for _ in range(4)
        )
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden if self.head is None else self.head(hidden)


def test_stages_of_a_module_are_captured_and_their_pipelines_simulated():
    with torch.device("meta"):
        model, inputs = Chain(), [torch.empty(8, 512, WIDE) for _ in range(2)]
    plan = plan_module(
        model,
        lambda model, hidden, wanted: F.mse_loss(model(hidden), wanted),
        inputs,
        CLUSTER,
        num_gpus=4,
        num_microbatches=2,
        stages=ModuleStages(
            degrees=[2],
            loss_of=F.mse_loss,
            naming=LayerNaming(layers="layers", last=("head",)),
            schedules=("1F1B", "DualPipeV", "2F2B"),
        ),
    )
    staged = {(e.recipe.schedule, e.recipe.memory_policy): e for e in plan.outcomes[-8:]}
    assert [*staged] == [(s, p) for s in ("1F1B", "DualPipeV") for p in MEMORY_POLICIES]
    like = {e.recipe.memory_policy: e for e in by_hand(plan) if e.recipe.dp_shard == 4}
    for (_, policy), each in staged.items():
        assert each.tokens_per_second_per_gpu * each.step_us == pytest.approx(
            like[policy].tokens_per_second_per_gpu * like[policy].step_us
        )
        assert each.computing_us == pytest.approx(like[policy].computing_us, rel=0.1)
        assert each.bubble > 0
    most, least = staged["1F1B", "save_all"], staged["1F1B", "full_recompute"]
    assert least.computing_us > 1.1 * most.computing_us
    # Three layers, of which two are trained, and Adam's two states; each rank has half.
    assert most.memory["optimizer state"] == 2 * 2 * 2 * 4 * WIDE * (WIDE + 1) // 2
    ((what, reason),) = plan.left_out.items()
    assert what == "pp 2 by 2F2B"
    assert reason.startswith("schedule '2F2B': ")
    assert f"  pp 2 by 2F2B     left out: {reason}" in str(plan).splitlines()


def test_a_module_that_no_solver_places_is_planned_without_it_and_left_as_it_was():
    class Drops(Model):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(F.dropout(hidden))

    model = Drops()
    before = dict(model.named_parameters())
    plan = plan_module(
        model,
        loss,
        [torch.zeros(1, 2, WIDTH)],
        CLUSTER,
        num_gpus=4,
        layers="blocks.*",
        tensor_parallel=[2],
        stages=ModuleStages(
            degrees=[2],
            loss_of=F.mse_loss,
            naming=LayerNaming(layers="blocks", last=("head", "tied")),
            schedules=["1F1B"],
        ),
    )
    after = dict(model.named_parameters())
    assert all(after[name] is each for name, each in before.items())
    assert not plan.placements
    assert plan.left_out["tp 2"].startswith(
        "the model cannot be planned: aten.bernoulli: draws random "
    )
    assert len(plan.outcomes) == 2 * len(MEMORY_POLICIES)
    # Whatever a stage's own code raises.
    assert plan.left_out["pp 2 by 1F1B"] == "TypeError: 'NoneType' object is not callable"
    assert f"  tp 2             left out: {plan.left_out['tp 2']}" in str(plan).splitlines()


def test_everything_wrong_with_a_request_is_told_at_once():
    with pytest.raises(ValueError, match="plan_module") as raised:
        plan_module(
            nn.Linear(2, 2).requires_grad_(False),
            loss,
            [torch.zeros(3, 2), torch.zeros(4)],
            CLUSTER,
            num_gpus=1,
            num_microbatches=0,
            tensor_parallel=[16],
            stages=ModuleStages(degrees=[3], loss_of=loss),
        )
    assert str(raised.value).splitlines() == [
        "plan_module:",
        "  num_gpus is 1, and must be 2 or more",
        "  num_microbatches is 0, and must be 1 or more",
        (
            "  tensor_parallel has 16, and may have nothing: what divides 1 GPUs into two groups "
            "or more, and NVLink domains of 8"
        ),
        "  stages.degrees has 3, and may have what divides 1 GPUs into groups of two or more",
        "  inputs have [(3,), (4,)] samples, and must have the same number, 1 or more",
        "  the model has no parameter that is trained",
        "  layers is 'layers.*', which no module of the model is; it has ",
    ]
