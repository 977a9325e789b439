"""HiGHS on the few options of a large part that matter, for prices and for choices.

Column generation (Gilmore and Gomory 1961): the LP relaxation over few options gives prices and a
mix of options; dual ascent with those prices bounds all options, and says which others belong into
the LP. Where bound and LP meet, the LP is that of all options. It is fractional in few nodes: the
MILP over the options that it mixes and the next best ones is small and gives good choices
(Berthold 2014, "RENS: the relaxation enforced neighborhood search").
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from gt_autoparallel.solver.bounding import SearchPart, SearchSettings
from gt_autoparallel.solver.highs_model import HighsModel, HighsResult
from gt_autoparallel.solver.incumbent import Incumbent
from gt_autoparallel.solver.mixtures import Mixture, best_mixture
from gt_autoparallel.solver.problem import BoolArray, FloatArray, IntArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem

_WEIGHT = 1e-7
"""Above which an option takes part in a fractional solution."""

_LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Quantiles of the options' bounds that are tried as limits of what is promising."""


@dataclass(slots=True)
class RestrictedPrograms:
    """Programs over promising options, and which options those were."""

    incumbent: Incumbent
    settings: SearchSettings
    time_left: Callable[[], float]
    """Gives the seconds that are left."""

    seen: list[set[int]]
    """For each variable: options that relaxations and choices took."""

    def see(self, choices: tuple[int, ...]) -> None:
        """Counts the options of a choice as promising."""
        for seen, choice in zip(self.seen, choices, strict=True):
            seen.add(choice)

    def relax(self, part: SearchPart) -> HighsResult | None:
        """The LP over the promising options; its solution becomes the part's weights.

        None if promising options alone have no solution. Its value is no bound of the part.
        """
        spread = self._spread(part)
        masks = self._promising(part, spread, self.settings.relaxed_pairs)
        rest = part.restricted(masks)
        if rest is None:
            return None
        result = HighsModel(rest).solve(integer=False, seconds=self.time_left())
        if not result.optimal or not result.weights:
            return None
        part.weights = weights_of_options(rest, result)
        for seen, weights in zip(self.seen, part.weights, strict=True):
            seen.update(weights)
        self.take(rest, result)
        return result

    def round(self, part: SearchPart, *, pairs: int) -> None:
        """The MILP over the options with weight, and the next best ones up to ``pairs`` pairs."""
        spread = self._spread(part) if pairs else None
        masks = [
            _among(node.options, weights)
            for node, weights in zip(part.reduced.nodes, part.weights, strict=True)
        ]
        if spread is not None:
            masks = self._promising(part, spread, pairs, base=masks)
        rest = part.restricted(masks)
        if rest is None:
            return
        result = HighsModel(rest).solve(
            integer=True,
            seconds=self.time_left(),
            gap=max(0.5 * self.incumbent.gap, 1e-6),
            max_nodes=self.settings.restricted_nodes,
        )
        self.take(rest, result)

    def mix(self, part: SearchPart, *, pairs: int, gap: float) -> Mixture | None:
        """The best mixture of the options with weight, and the next best ones up to ``pairs``."""
        base = [
            _among(node.options, {*weights, *known})
            for node, weights, known in zip(
                part.reduced.nodes, part.weights, self._best(part), strict=True
            )
        ]
        masks = base
        if pairs:
            masks = self._promising(part, self._spread(part), pairs, base=base)
        return best_mixture(
            self.incumbent.problem,
            [node.options[mask] for node, mask in zip(part.reduced.nodes, masks, strict=True)],
            relative_gap=gap,
            seconds=self.time_left(),
            max_nodes=self.settings.mixture_nodes,
        )

    def _best(self, part: SearchPart) -> list[tuple[int, ...]]:
        """The option of each node in the best choice, if there is any."""
        choices = self.incumbent.choices
        return [(choice,) for choice in choices] or [()] * len(part.reduced.nodes)

    def take(self, reduced: ReducedProblem, result: HighsResult) -> bool:
        """Offers what HiGHS found; whether any of it keeps the budgets."""
        kept = False
        for positions in result.positions:
            choices = reduced.choices(positions)
            kept |= self.incumbent.offer(choices)
            self.see(choices)
        return kept

    @staticmethod
    def _spread(part: SearchPart) -> list[FloatArray]:
        """For each node [K]: by how much an option's bound exceeds the least one's."""
        return [
            node.bounds_of_one(values) - values.min()
            for node, values in zip(part.reduced.nodes, part.option_bounds(), strict=True)
        ]

    def _promising(
        self,
        part: SearchPart,
        spread: list[FloatArray],
        pairs: int,
        *,
        base: list[BoolArray] | None = None,
    ) -> list[BoolArray]:
        """``base`` and the options of least spread such that about so many pairs are left.

        The first level may take more. ``base`` is by default all options that were seen.
        """
        if base is None:
            base = [
                _among(node.options, seen)
                for node, seen in zip(part.reduced.nodes, self.seen, strict=True)
            ]
        # From which level on each option is taken, and with its first option each label.
        taken = [np.where(mask, -np.inf, values) for values, mask in zip(spread, base, strict=True)]
        links = [
            tuple(
                _least(taken[end], link.labels[side], link.cost.shape[side])
                for side, end in enumerate(link.ends)
            )
            for _, link in part.reduced.live_links()
        ]
        levels = np.quantile(np.concatenate(spread), _LEVELS).tolist()
        chosen = levels[0]
        for level in levels[1:]:
            sizes = ((left <= level).sum() * (right <= level).sum() for left, right in links)
            if sum(map(int, sizes)) > pairs:
                break
            chosen = level
        return [values <= chosen for values in taken]


def _among(options: IntArray, wanted: Collection[int]) -> BoolArray:
    """[K] Whether each option is one of the wanted."""
    return np.array([option in wanted for option in options.tolist()], dtype=bool)


def _least(values: FloatArray, labels: IntArray, count: int) -> FloatArray:
    """[labels] The least value [K] of the options of each label."""
    least = np.full(count, np.inf)
    np.minimum.at(least, labels, values)
    return least


def weights_of_options(reduced: ReducedProblem, result: HighsResult) -> list[dict[int, float]]:
    """For each node: option -> its weight in the solution of a relaxation, without zeros."""
    return [
        {
            int(option): float(weight)
            for option, weight in zip(node.options, weights, strict=True)
            if weight > _WEIGHT
        }
        for node, weights in zip(reduced.nodes, result.weights, strict=True)
    ]
