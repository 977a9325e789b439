"""What the actions of a stage read of its state: gathered parameters, from UNSHARD to RESHARD."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gt_passes.analysis.storages import Storages, flat
from gt_pipeline.errors import StageOrderError
from gt_pipeline.graph.executables import Executable
from gt_pipeline.graph.launched_executable import LaunchedAction, LaunchedExecutable
from gt_pipeline.graph.recorded_actions import StageRecordings
from gt_pipeline.graph.slots import Slot
from gt_pipeline.graph.stage_inputs import StageState


class StageValues:
    """Parameters and buffers, sampled and gathered; what uses gathered ones first waits for them.

    Args:
        state: of the stage's module.
        unshard: UNSHARD of the stage.
        recordings: of its actions, which read gathered parameters at addresses that stay.
    """

    def __init__(
        self, state: StageState, unshard: LaunchedExecutable, recordings: StageRecordings
    ) -> None:
        self._state = state
        self._unshard = unshard
        self._is_sharded = not unshard.action.is_empty
        self._recordings = recordings
        self._values: dict[Slot, Tensor] | None = None
        self._gathering: LaunchedAction | None = None
        self._stand = False
        """Whether they lie where recordings read them."""

        self._of: dict[Executable, tuple[Tensor, ...]] = {}

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered parameters; 0 if nothing is sharded."""
        if not self._is_sharded:
            return 0
        action = self._unshard.action
        storages = Storages(action.graph_module)
        held = {each for node in action.result_nodes() for each in flat(storages.held[node])}
        return sum(storages.num_bytes[each] for each in held)

    def unshard(self, state: Sequence[Tensor] | None = None) -> None:
        """Sample the state, or take ``state`` for it, and launch the gathering of parameters."""
        values = self._state.sample(state)
        self._hold(values)
        if self._is_sharded:
            inputs = [values[slot] for slot in self._unshard.action.inputs]
            self._gathering = self._unshard.launch(inputs)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        if self._gathering is not None:
            self._gathering.finish()  # or what is under way is never waited for
        self._hold(None)

    def discard(self) -> None:
        """Forget all of it, also what is being gathered."""
        self._hold(None)

    def are_known_to(self, executable: Executable) -> bool:
        """Whether ``of`` has been asked for this action since they were sampled."""
        return executable in self._of

    def of(self, executable: Executable, state: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """What an action's graph reads of them, in order.

        Args:
            executable: of the action.
            state: as for ``unshard``, which is called if nothing is sharded and none was.

        Raises:
            StageOrderError: parameters are sharded, and were not gathered.
        """
        if (known := self._of.get(executable)) is not None:
            return known
        if self._values is None:
            if self._is_sharded:
                action = executable.action
                raise StageOrderError(
                    f"stage {action.stage_index} was asked for {action.kind} without its "
                    "parameters: call unshard before"
                )
            self.unshard(state)
        assert self._values is not None
        if self._gathering is not None:
            gathered, self._gathering = self._gathering.finish(), None
            self._values.update(zip(self._unshard.action.outputs, gathered, strict=True))
        if self._recordings.is_used and not self._stand:
            self._values, self._stand = self._recordings.standing(self._values), True
        found = tuple(self._values[slot] for slot in executable.action.static_inputs)
        self._of[executable] = found
        return found

    def _hold(self, values: dict[Slot, Tensor] | None) -> None:
        self._values, self._stand = values, False
        self._gathering = None
        self._of.clear()
