"""A capture refuses a step that sets generators, or draws outside of operators, by its line."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gt_trace import CaptureError, trace_step
from gt_trace.capture.python_state import PythonState
from gt_trace.joint import export_joint_graph
from gt_trace.stamping import trace_step_by_stamping

numpy = pytest.importorskip("numpy")

GENERATOR = torch.Generator().manual_seed(1)
NUMPY_GENERATOR = numpy.random.default_rng(0)
LEGACY_GENERATOR = numpy.random.RandomState(0)
PYTHON_GENERATOR = random.Random(0)


class Holder:
    def __init__(self) -> None:
        self.generators = {"noise": [numpy.random.default_rng(1)]}

    def scale(self) -> float:
        return float(self.generators["noise"][0].random())


HOLDER = Holder()


def forks_and_seeds(y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return y * torch.rand(4)


def forks(y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        y = y * torch.rand(4)
    return y * torch.rand(4)


def sets_back(y: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = functional.dropout(y)
    torch.set_rng_state(state)
    return first - functional.dropout(y)


def seeds(y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return y


def seeds_at_random(y: Tensor) -> Tensor:
    torch.seed()
    return functional.dropout(y)


def sets_back_its_generator(y: Tensor) -> Tensor:
    state = GENERATOR.get_state()
    first = torch.rand(4, generator=GENERATOR)
    GENERATOR.set_state(state)
    return y * first * torch.rand(4, generator=GENERATOR)


def seeds_its_generator(y: Tensor) -> Tensor:
    GENERATOR.manual_seed(0)
    return y * torch.rand(4, generator=GENERATOR)


def makes_a_generator(y: Tensor) -> Tensor:
    return y * torch.rand(4, generator=torch.Generator().manual_seed(0))


def draws_by_numpy(y: Tensor) -> Tensor:
    return y * torch.tensor(numpy.random.rand(4), dtype=torch.float32)


def draws_by_python(y: Tensor) -> Tensor:
    return y * random.random()


def draws_from_a_numpy_generator(y: Tensor) -> Tensor:
    return y[:, NUMPY_GENERATOR.permutation(4)]


def draws_from_a_legacy_generator(y: Tensor) -> Tensor:
    return y * LEGACY_GENERATOR.rand()


def draws_from_a_python_generator(y: Tensor) -> Tensor:
    return y if PYTHON_GENERATOR.random() < 0.5 else -y


def draws_from_a_held_generator(y: Tensor) -> Tensor:
    return y * HOLDER.scale()


CHANGES = {
    forks_and_seeds: ("PyTorch's generator changed", "torch.manual_seed(0)"),
    forks: ("PyTorch's generator changed", "with torch.random.fork_rng():"),
    sets_back: ("PyTorch's generator changed", "torch.set_rng_state(state)"),
    seeds: ("PyTorch's generator changed", "torch.manual_seed(0)"),
    seeds_at_random: ("PyTorch's generator changed", "torch.seed()"),
    sets_back_its_generator: (
        f"generator {__name__}.GENERATOR changed",
        "GENERATOR.set_state(state)",
    ),
    seeds_its_generator: (f"generator {__name__}.GENERATOR changed", "GENERATOR.manual_seed(0)"),
    makes_a_generator: ("aten.rand.generator (rand) is made inside of the step", ""),
    draws_by_numpy: ("NumPy's generator (numpy.random) changed", "numpy.random.rand(4)"),
    draws_by_python: ("Python's generator (random) changed", "random.random()"),
    draws_from_a_numpy_generator: ("NUMPY_GENERATOR changed", "NUMPY_GENERATOR.permutation(4)"),
    draws_from_a_legacy_generator: ("LEGACY_GENERATOR changed", "LEGACY_GENERATOR.rand()"),
    draws_from_a_python_generator: ("PYTHON_GENERATOR changed", "PYTHON_GENERATOR.random()"),
    draws_from_a_held_generator: (
        "HOLDER.generators['noise'][0] changed",
        'self.generators["noise"][0].random()',
    ),
}


class Model(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.linear(x))


def step_of(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).sum()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    return step


def states() -> list[Any]:
    torch_states = [torch.get_rng_state().tolist(), GENERATOR.get_state().tolist()]
    numpy_states = [
        pickle.dumps(NUMPY_GENERATOR.bit_generator.state),
        pickle.dumps(LEGACY_GENERATOR.get_state()),
        pickle.dumps(numpy.random.get_state()),
    ]
    return [*torch_states, *numpy_states, random.getstate(), PYTHON_GENERATOR.getstate()]


@pytest.mark.parametrize("noise", CHANGES, ids=lambda each: each.__name__)
def test_a_step_that_a_replay_would_not_repeat_is_refused_and_leaves_generators_alone(noise):
    model = Model(noise)
    torch.manual_seed(0)  # as the steps do, so that their states are those of before
    before = states()
    name, line = CHANGES[noise]
    with pytest.raises(CaptureError, match="the step sets a random number generator") as refusal:
        trace_step(step_of(model), module=model)(torch.ones(2, 4))
    assert name in str(refusal.value)
    assert line in str(refusal.value)
    assert states() == before


@pytest.mark.parametrize("noise", [sets_back, seeds, draws_by_numpy, makes_a_generator])
def test_joint_graphs_refuse_it_too(noise):
    model = Model(noise)
    before = states()
    with pytest.raises(CaptureError, match="the step sets a random number generator") as refusal:
        export_joint_graph(model, (torch.ones(2, 4),))
    assert CHANGES[noise][1] in str(refusal.value)
    assert states() == before


def test_a_capture_by_stamping_refuses_it_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList(Model(draws_by_numpy) for _ in range(6)))

    def step(x: Tensor) -> tuple[Tensor, ...]:
        x = model[0](x)
        for layer in model[1]:
            x = layer(x)
        return torch.autograd.grad(x.sum(), list(model.parameters()))

    before = states()
    with pytest.raises(CaptureError, match=r"NumPy's generator \(numpy.random\) changed at"):
        trace_step_by_stamping(step, module=model)(torch.ones(2, 4))
    assert states() == before


def draws_from_a_generator(y: Tensor) -> Tensor:
    y = y * torch.rand(4, generator=GENERATOR) + torch.randn(2, 4, generator=GENERATOR)
    kept = torch.empty_like(y).bernoulli_(0.5, generator=GENERATOR)
    return functional.dropout(y * kept)[:, torch.randperm(4, generator=GENERATOR)] * y


def draws_from_a_hidden_generator() -> Callable[[Tensor], Tensor]:
    torch._hidden_from_tests = GENERATOR  # objects that are not searched
    return lambda y: y * torch.rand(4, generator=torch._hidden_from_tests)


def repeats_python_numbers(y: Tensor) -> Tensor:
    state = random.getstate()
    random.seed(0)
    scale = random.random()
    random.setstate(state)
    return y * scale


def draws_inside_of_a_fork_only(y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        y = y.sin()
    return functional.dropout(y)


@pytest.mark.parametrize(
    "noise",
    [
        draws_from_a_generator,
        draws_from_a_hidden_generator(),
        repeats_python_numbers,
        draws_inside_of_a_fork_only,
    ],
)
def test_a_generator_that_operators_draw_from_advances_as_in_eager(noise):
    model, x = Model(noise), torch.randn(2, 4)
    before = states()
    step = step_of(model)
    captured = trace_step(step, module=model)(x).bind(model)
    assert states() == before
    found = []
    for run in (step, captured):
        torch.manual_seed(3)
        GENERATOR.manual_seed(3)
        found.append([value for _ in range(3) for value in run(x)] + [torch.rand(1)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_a_step_cannot_reach_is_not_searched():
    model = Model(draws_from_a_held_generator)
    state = PythonState({"module": model, "step": step_of(model)})
    names = {held.name for held in state.generators}
    assert f"the generator {__name__}.HOLDER.generators['noise'][0]" in names
    assert not any("LEGACY_GENERATOR" in name for name in names)
