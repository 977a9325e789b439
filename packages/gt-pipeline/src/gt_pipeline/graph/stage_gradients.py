"""A stage's gradients in one step: summed over microbatches, then reduced over ranks, once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gt_pipeline.graph.gradient_accumulators import GradientAccumulators
from gt_pipeline.graph.launched_executable import LaunchedAction, LaunchedExecutable
from gt_pipeline.graph.slots import Slot
from gt_pipeline.graph.stage_capture import StageCapture
from gt_trace import unflatten_tensor


class StageGradients:
    """What backwards add to, and what REDUCE_GRAD makes of it.

    Args:
        capture: of the stage.
        slots: of what one backward gives, in its order.
        reduce: REDUCE_GRAD of the stage.
    """

    def __init__(
        self, capture: StageCapture, slots: Sequence[Slot], reduce: LaunchedExecutable
    ) -> None:
        self._layouts = capture.gradient_layouts
        self._slots = slots
        self._reduce = reduce
        self._has_reduction = not reduce.action.is_empty
        self.sums = GradientAccumulators()
        """What the step's backwards add to."""

        self._final: dict[Slot, Tensor] = {}
        """Gradients that are as their parameters are; once reduced, all of them."""

        self._reducing: LaunchedAction | None = None

    def launch_reduction(self) -> None:
        """Launch the first reductions of the sums; nothing if there are no sums."""
        sums = self.sums.take()
        if sums is None:
            return
        self._final = dict(zip(self._slots, sums, strict=True))
        del sums
        if self._has_reduction:
            inputs = [self._final.pop(slot) for slot in self._reduce.action.inputs]
            self._reducing = self._reduce.launch(inputs)
        if self.sums.stands:
            # The next step adds to what lies there.
            self._final = {slot: each.clone() for slot, each in self._final.items()}

    def continue_reduction(self) -> None:
        """Wait for the reductions under way, and launch those that needed their results."""
        if self._reducing is not None:
            self._reducing.go_on()

    def reduced(self) -> dict[str, Tensor]:
        """Wait for the reduction; gradients by name, as their parameters are."""
        if self._reducing is not None:
            results, self._reducing = self._reducing.finish(), None
            owned = self._reduce.owned_gradients
            for slot, gradient, own in zip(
                self._reduce.action.outputs, results, owned, strict=True
            ):
                self._final[slot] = gradient if own else gradient.clone()
        if not self._final:
            return {}
        leaves: dict[str, dict[int, Tensor]] = {}
        for slot, gradient in self._final.items():
            leaves.setdefault(slot.name, {})[slot.leaf] = gradient
        return {
            name: unflatten_tensor([leaves[name][i] for i in range(layout.num_leaves)], layout)
            for name, layout in self._layouts.items()
        }

    def discard(self) -> None:
        """Forget all of it."""
        self.sums.take()
        self._final = {}
        self._reducing = None
