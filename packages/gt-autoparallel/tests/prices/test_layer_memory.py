"""Which moment of the backward is the fullest, by saved bytes and gradients of layers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gt_autoparallel.prices.layer_memory import LayerMemory


def memory_of(
    saved: Sequence[int], gradients: Sequence[int], again: Sequence[int], unreduced: int = 0
) -> LayerMemory:
    layers = tuple(f"layers.{place}" for place in range(len(saved)))
    return LayerMemory(
        saved={**dict(zip(layers, saved, strict=True)), "norm": 1000},
        read_late={},
        again=dict(zip(layers, again, strict=True)),
        ahead={},
        unreduced=dict.fromkeys(layers, unreduced),
        gradients=dict(zip(layers, gradients, strict=True)),
        layers=layers,
    )


def test_where_more_is_saved_it_is_fullest_before_anything_is_let_go() -> None:
    most = memory_of([50, 50, 50], [20, 20, 20], [7, 8, 7]).fullest_backward
    assert (most.made, most.let_go, most.to_come) == (8, 0, 40)


def test_where_gradients_are_more_it_is_fullest_in_the_turn_of_the_first_layer() -> None:
    most = memory_of([20, 20, 20], [50, 50, 50], [7, 7, 7]).fullest_backward
    assert (most.made, most.let_go, most.to_come) == (7, 40, 0)


def test_at_a_reduction_what_the_layer_saved_is_gone_too() -> None:
    most = memory_of([20, 20, 20], [50, 50, 50], [0, 0, 0], unreduced=9).fullest_reduction
    assert most is not None
    assert (most.made, most.let_go, most.to_come) == (9, 60, 0)
    most = memory_of([50, 50, 50], [20, 20, 20], [0, 0, 0], unreduced=9).fullest_reduction
    assert most is not None
    assert (most.made, most.let_go, most.to_come) == (9, 50, 40)


def test_without_layers_in_turn_everything_counts() -> None:
    memory = LayerMemory(
        saved={"layers.0": 5, "layers.1": 5},
        read_late={},
        again={"layers.0": 3, "layers.1": 2},
        ahead={"layers.1": 2},
        unreduced={},
        gradients={},
        layers=(),
    )
    most = memory.fullest_backward
    assert (most.made, most.ahead, most.let_go, most.to_come) == (2, 2, 0, 0)
    assert memory.fullest_reduction is None


def bytes_by_rows(
    saved: Sequence[int], gradients: Sequence[int], again: Sequence[int]
) -> list[int]:
    """The bytes of alike layers by the rows that a problem has: all saved, the first, the last."""
    found = []
    for own_saved, own_gradients, made in zip(saved, gradients, again, strict=True):
        found.append(sum(saved) + own_gradients + made)  # also in the turn of the last
        found.append(own_saved + sum(gradients) + made)
    return found


def test_layers_that_give_back_least_first_are_fullest_at_one_of_the_ends() -> None:
    """What makes rows for the first and the last layer enough for mixtures."""
    rng = random.Random(0)
    disordered = 0
    for _ in range(2000):
        layers = [
            (rng.randrange(40), rng.randrange(40), rng.randrange(9))
            for _ in range(rng.randint(1, 7))
        ]
        most = max(bytes_by_rows(*zip(*layers, strict=True)))
        disordered += in_all(layers) > most
        layers.sort(key=lambda layer: layer[0] - layer[1])
        assert in_all(layers) <= most
    assert disordered > 10


def in_all(layers: Sequence[tuple[int, int, int]]) -> int:
    saved, gradients, again = zip(*layers, strict=True)
    return sum(saved) + sum(gradients) + memory_of(saved, gradients, again).fullest_backward.size
