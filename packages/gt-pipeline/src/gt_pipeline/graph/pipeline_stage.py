"""A pipeline stage whose every action runs a graph made before: no autograd at run time.

Here is what a stage holds from action to action. The graphs are ``stage_executables``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_pipeline.errors import StageInputError, StageOrderError
from gt_pipeline.graph._torch_internals import FakeTensorMode
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.executables import Executable, GraphTransform
from gt_pipeline.graph.gradient_accumulators import GradientAccumulators
from gt_pipeline.graph.launched_executable import LaunchedAction, LaunchedExecutable
from gt_pipeline.graph.overlapped_actions import OverlappedActions
from gt_pipeline.graph.recorded_actions import StageRecordings
from gt_pipeline.graph.replayed_steps import ReplayedSteps, StageReads
from gt_pipeline.graph.rewrite_stage import (
    RewrittenStage,
    refuse_other_stage,
    rewrite_stage,
)
from gt_pipeline.graph.slots import Slot
from gt_pipeline.graph.stage_capture import StageCapture, StageLoss, capture_stage
from gt_pipeline.graph.stage_evaluations import EvaluationForward
from gt_pipeline.graph.stage_executables import StageExecutables
from gt_pipeline.graph.stage_inputs import MicrobatchReader, StageState
from gt_pipeline.graph.stage_values import StageValues
from gt_pipeline.runner.stage_protocol import (
    ActivationSignature,
    MicrobatchInputs,
    PipelineStageGraphs,
    Tensors,
)
from gt_trace import unflatten_tensor

JointTransform = Callable[[StageCapture], object]
"""Edits a stage's joint graph in place, before it is cut: memory policies, chunks."""


class GraphPipelineStage:
    """A stage of captured graphs, as ``GraphPPRunner`` drives it.

    ::

        stage = GraphPipelineStage(module, stage_index=1, num_stages=4, activations=signatures)
        outputs = stage.forward(0, activations, MicrobatchInputs())
        input_gradients = stage.full_backward(0, output_gradients)
        stage.reduce_gradients()
        stage.gradients()

    Everything about microbatches, order and memory is as ``PipelineStageGraphs`` says. Parameters
    are read from the module at every UNSHARD, or once a step if nothing is sharded. What a
    transform marks (``gt_passes.CudaGraphs``) is recorded and replayed: whole steps if all graphs
    of a rank are marked (``replayed_steps``), else actions (``recorded_actions``).

    Args:
        module: the stage's part of the model, parallelized or not.
        stage_index: position in the model, from 0.
        num_stages: of the whole pipeline.
        activations: what the stage before sends, or only its shapes and dtypes; empty for the first
            stage.
        inputs: a microbatch as the runner gives it, of real tensors or such on meta.
        loss_fn: of the last stage: part of its forward.
        device: where the stage runs.
        prepare_capture: edits the joint graph before it is cut.
        transform: edits the graph of each action, pair of actions and evaluation.
        rewritten: the graphs of a stage like this one (``rewrite_stage``, ``STAGE_FORM``). Its
            actions run as they are: they are neither captured, cut nor transformed. Pairs of
            actions and evaluations are made at first use, and transformed.
        fake_mode: ``fake_mode`` of another stage of this rank; the graphs of stages that overlap
            need one and the same.
        verify: whether to verify every graph, as captured, as cut and as transformed.
        **capture_options: further options of ``capture_stage``.

    Raises:
        StageCaptureError, StageCutError, StageGraphError: as ``capture_stage`` and ``cut_stage``;
            the first also for ``rewritten`` of another stage, the last for a transform that breaks
            a graph.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_index: int,
        num_stages: int,
        activations: Sequence[Tensor | ActivationSignature] = (),
        inputs: MicrobatchInputs | None = None,
        loss_fn: StageLoss | None = None,
        device: torch.device | str = "cpu",
        prepare_capture: JointTransform | None = None,
        transform: GraphTransform | None = None,
        rewritten: RewrittenStage | None = None,
        fake_mode: FakeTensorMode | None = None,
        verify: bool = True,
        **capture_options: object,
    ) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self._module = module
        capture_now = functools.partial(
            capture_stage,
            module,
            stage_index=stage_index,
            num_stages=num_stages,
            activations=tuple(activations),
            inputs=inputs,
            loss_fn=loss_fn,
            device=device,
            verify=verify,
            **capture_options,  # type: ignore[arg-type]  # checked where they arrive
        )
        if rewritten is None:
            capture = capture_now(fake_mode=fake_mode)
            if prepare_capture is not None:
                prepare_capture(capture)
            rewritten = rewrite_stage(capture, transform=transform, verify=verify)
        else:
            capture = rewritten.graphs.capture
            refuse_other_stage(
                capture,
                stage_index=stage_index,
                num_stages=num_stages,
                activations=activations,
                has_loss=loss_fn is not None,
            )
        self.graphs = rewritten.graphs
        self.rewritten = rewritten
        """The graphs that run, with those they were cut from."""

        self._state = state = StageState(capture, module)
        self._reader = MicrobatchReader(capture)
        self._recordings = StageRecordings()
        self._executables = StageExecutables(
            rewritten,
            module,
            capture_evaluation=lambda: capture_now(fake_mode=self.fake_mode, differentiate=False),
            transform=transform,
            recordings=self._recordings,
            verify=verify,
        )
        self._computing = self._executables.computing
        self._values = StageValues(state, self._executables.unshard, self._recordings)
        self._num_outputs = len(capture.output_signature)
        self._num_arriving = sum(each.requires_grad for each in capture.output_signature)
        self._num_leaving = sum(each.requires_grad for each in capture.input_signature)
        self._evaluation: EvaluationForward | None = None
        """The one that ran last."""

        self.reads: StageReads | None = None
        """While a whole step is recorded: its state and microbatches."""

        self._saved: dict[int, list[Tensor]] = {}
        self._between: dict[int, list[Tensor]] = {}
        self._gradients = StageGradients(
            capture, self._computing["FULL_BACKWARD"].gradient_slots, self._executables.reduce
        )

    @property
    def capture(self) -> StageCapture:
        """What the stage's graphs were cut from."""
        return self.graphs.capture

    @property
    def actions(self) -> Mapping[PipelineAction, ActionGraph]:
        """The graph that each action runs, after the transform, by kind."""
        return self._executables.actions

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The fake mode of the capture; other stages of this rank are to be captured with it."""
        return self.capture.traced.fake_mode

    @property
    def input_signature(self) -> tuple[ActivationSignature, ...]:
        """Activations from the stage before; empty for the first stage."""
        return self.capture.input_signature

    @property
    def output_signature(self) -> tuple[ActivationSignature, ...]:
        """What ``forward`` returns."""
        return self.capture.output_signature

    @property
    def known_kwargs(self) -> frozenset[str] | None:
        """Keyword arguments that the module's forward can take; None: any."""
        return self.capture.known_kwargs

    @property
    def num_saved(self) -> int:
        """Microbatches of which values are kept for a backward."""
        return len(self._saved) + len(self._between)

    def collectives(self) -> Mapping[str, tuple[str, ...]]:
        """The collectives of every graph, those of pairs that are ready included, in order.

        Returns:
            A line for each, by the action that launches it; actions without any are missing.
        """
        return self._executables.collectives()

    def group_names(self) -> tuple[str, ...]:
        """The process groups in which its actions communicate, by name, each once.

        Pairs of actions and evaluations use no others.
        """
        return self._executables.group_names()

    # ---- parameters -----------------------------------------------------------------------------

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the gathered parameters; 0 if nothing is sharded."""
        return self._values.gathered_bytes

    def unshard(self) -> None:
        """Gather the parameters, and keep them until ``reshard``; what uses them first waits."""
        self._values.unshard(None if self.reads is None else self.reads.state)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        self._values.reshard()

    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters by name."""
        return dict(self._module.named_parameters())

    def _static(self, executable: Executable) -> tuple[Tensor, ...]:
        """What an action's graph reads of the state, in order."""
        reads = self.reads
        return self._values.of(executable, None if reads is None else reads.state)

    def _static_of_forward(self) -> tuple[Tensor, ...]:
        forward = self._computing["FORWARD"]
        if not self._values.are_known_to(forward):
            # Once for each time that parameters are gathered, not for each microbatch.
            self.check_state()
        return self._static(forward)

    # ---- actions --------------------------------------------------------------------------------

    def forward(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        """Compute one microbatch and keep what its backward needs.

        Raises:
            StageInputError: it is not as the captured one.
            StageOrderError: its forward ran already, and its backward did not.
            gt_trace.StateMismatchError: the module has another mode, hooks, or parameters that
                require a gradient, than when it was captured; or autocast is another.
        """
        arguments = self._arguments(microbatch, activations, inputs)
        static = self._static_of_forward()
        results = self._computing["FORWARD"].run_microbatch(
            [*static, *arguments], self._gradients.sums, forward=self._recordings.enter(microbatch)
        )
        return self._keep_saved(microbatch, results)

    def full_backward(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """Accumulate one microbatch's parameter gradients; return those of its inputs.

        Raises:
            StageOrderError: nothing is saved for it.
        """
        results = self._run_backward("FULL_BACKWARD", microbatch, output_gradients)
        self._recordings.leave(microbatch)
        return tuple(results)

    def backward_input(self, microbatch: int, output_gradients: Tensors) -> Tensors:
        """The part of ``full_backward`` that the stage before waits for.

        Raises:
            StageOrderError: nothing is saved for it.
        """
        results = self._run_backward("BACKWARD_INPUT", microbatch, output_gradients)
        return self._keep_between(microbatch, results)

    def backward_weight(self, microbatch: int) -> None:
        """The rest of ``full_backward``.

        Raises:
            StageOrderError: its ``backward_input`` did not run.
        """
        executable = self._computing["BACKWARD_WEIGHT"]
        if microbatch not in self._between:
            raise StageOrderError(
                f"stage {self.stage_index} was asked for BACKWARD_WEIGHT of microbatch "
                f"{microbatch} without its BACKWARD_INPUT; it holds {sorted(self._between)}"
            )
        executable.run_microbatch(
            [*self._static(executable), *self._between.pop(microbatch)],
            self._gradients.sums,
            backward=self._recordings.place(microbatch),
        )
        self._recordings.leave(microbatch)

    def overlap(
        self,
        microbatch: int,
        activations: Tensors,
        inputs: MicrobatchInputs,
        *,
        backward_stage: PipelineStageGraphs,
        backward_kind: OverlappedBackward,
        backward_microbatch: int,
        output_gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """This stage's forward and a local stage's backward as one graph, interleaved.

        Raises:
            TypeError: the other stage is not one of graphs.
            ValueError: there is no such kind of backward.
        """
        if not isinstance(other := backward_stage, GraphPipelineStage):
            raise TypeError(
                "a GraphPipelineStage overlaps with another, and this is a "
                f"{type(backward_stage).__name__}"
            )
        actions, pair = self._executables.pair(other._executables, backward_kind)
        arguments = self._arguments(microbatch, activations, inputs)
        executable = other._computing[backward_kind]
        of_backward, of_forward = other._static(executable), self._static_of_forward()
        static = [*of_backward, *[of_forward[i] for i in actions.forward_static]]
        saved = other._take_saved(backward_microbatch, output_gradients, executable)
        inputs_of_pair = [*static, *output_gradients, *saved, *arguments]
        del saved  # the list is emptied as it is used, so that memory is freed early
        results = pair.run_microbatch(
            inputs_of_pair,
            other._gradients.sums,
            forward=self._recordings.enter(microbatch),
            backward=other._recordings.place(backward_microbatch),
        )
        num_backward = len(executable.action.outputs) - len(executable.gradient_slots)
        leaving = tuple(results[:num_backward])
        if backward_kind == "FULL_BACKWARD":
            other._recordings.leave(backward_microbatch)
        else:
            leaving = other._keep_between(backward_microbatch, leaving)
        return self._keep_saved(microbatch, results[num_backward:]), leaving

    def prepare_overlap(
        self, backward_stage: GraphPipelineStage, backward_kind: OverlappedBackward
    ) -> OverlappedActions:
        """Make the graph of ``overlap`` now, instead of at its first use.

        Raises:
            StageCutError: the two stages were captured with different fake modes.
            ValueError: there is no such kind of backward.
        """
        return self._executables.pair(backward_stage._executables, backward_kind)[0]

    def overlapped_action(
        self, backward_stage: GraphPipelineStage, backward_kind: OverlappedBackward
    ) -> ActionGraph:
        """The graph that ``overlap`` runs, after the transform.

        Raises:
            StageCutError, ValueError: as for ``prepare_overlap``.
        """
        return self._executables.pair(backward_stage._executables, backward_kind)[1].action

    def evaluate(self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        """As ``forward``, with nothing kept.

        The module's forward is captured for it when it is first asked for, in each mode of the
        module and its parts (training or evaluation), and of autocast.
        """
        if microbatch == 0 and self.graphs.unshard.is_empty:
            self._values.discard()  # parameters may have been replaced since
        evaluation = self._evaluation
        if evaluation is None or not self._values.are_known_to(evaluation.forward):
            # Once for each time that parameters are gathered, not for each microbatch.
            self._evaluation = evaluation = self._executables.evaluations.now()
        evaluation.reader.check_activations(activations)
        arguments = [*activations, *evaluation.reader.read(inputs)]
        return tuple(evaluation.forward.run([*self._static(evaluation.forward), *arguments]))

    def prepare_evaluation(self) -> None:
        """Capture what ``evaluate`` runs in the module's present mode now, not at its first use."""
        self._executables.evaluations.now()

    @property
    def num_reduction_parts(self) -> int:
        """The launch, and one for each wait that stands between two reductions or at the end."""
        return self._executables.reduce.num_parts

    def reduce_gradients(self) -> None:
        """Launch the reduction of the accumulated gradients over data-parallel ranks."""
        self._gradients.launch_reduction()

    def continue_reduction(self) -> None:
        """Launch what needs the result of an earlier reduction, and wait for that."""
        self._gradients.continue_reduction()

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients of the step, reduced, by name; a parameter without gradient is missing."""
        return self._gradients.reduced()

    @property
    def records_actions(self) -> bool:
        """Whether actions are recorded one by one: those of a stage, not whole steps of a rank."""
        return self._recordings.is_used

    def release_recordings(self) -> None:
        """Drop recorded CUDA graphs, if any, before the process groups that they keep alive go."""
        self._recordings.release()

    def discard(self) -> None:
        """Drop accumulators, saved values and gathered parameters."""
        self._saved.clear()
        self._between.clear()
        self._recordings.clear()
        self._gradients.discard()
        self._values.discard()

    # ---- whole steps, recorded ------------------------------------------------------------------

    def step_replayer(self, stages: Mapping[int, PipelineStageGraphs]) -> ReplayedSteps | None:
        """What records and replays whole steps of a rank's stages.

        None if some graph of theirs cannot be recorded, or none is to be. Else none of them records
        its actions any more.

        Args:
            stages: of this rank, by index.
        """
        graphs = {i: stage for i, stage in stages.items() if isinstance(stage, GraphPipelineStage)}
        all_executables = [stage._executables for stage in graphs.values()]
        marks = [mark for each in all_executables for mark in each.marks]
        marks += [mark for each in all_executables for mark in each.marks_of_pairs()]
        how = next((mark for mark in marks if mark is not None), None)
        records_whole = how is not None and None not in marks and len(graphs) == len(stages)
        for stage in graphs.values():
            stage._recordings.is_enabled = not records_whole
        return ReplayedSteps(graphs, how) if how is not None and records_whole else None

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers where they are now, by slot."""
        return {str(slot): tensor for slot, tensor in self._state.sample().items()}

    def plain_inputs(self, inputs: MicrobatchInputs) -> list[Tensor]:
        """What a forward reads of a microbatch besides activations.

        Raises:
            StageInputError: it is not as the captured one.
        """
        return self._reader.read(inputs)

    def check_state(self) -> None:
        """Make sure that a training step would run as it was captured.

        Raises:
            gt_trace.StateMismatchError: as ``forward``.
        """
        self._state.check_mode()

    # ---- what actions share ---------------------------------------------------------------------

    def _arguments(
        self, microbatch: int, activations: Tensors, inputs: MicrobatchInputs
    ) -> list[Tensor]:
        if microbatch in self._saved:
            raise StageOrderError(
                f"stage {self.stage_index} was asked for FORWARD of microbatch {microbatch} again, "
                "before its backward; discard() ends a step that failed"
            )
        self._reader.check_activations(activations)
        if self.reads is not None:
            return [*activations, *self.reads.inputs[microbatch]]
        return [*activations, *self._reader.read(inputs)]

    def _keep_saved(self, microbatch: int, results: Sequence[Tensor]) -> Tensors:
        self._saved[microbatch] = list(results[self._num_outputs :])
        return tuple(results[: self._num_outputs])

    def _take_saved(
        self, microbatch: int, output_gradients: Tensors, executable: Executable
    ) -> list[Tensor]:
        kind = executable.action.kind
        if microbatch not in self._saved:
            raise StageOrderError(
                f"stage {self.stage_index} was asked for {kind} of microbatch {microbatch} without "
                f"its FORWARD; it holds {sorted(self._saved)}"
            )
        num_given = len(output_gradients)
        if num_given != self._num_arriving:
            problem = f"{num_given} output gradients, and {self._num_arriving} outputs require one"
            raise StageInputError(
                what=f"{kind} of stage {self.stage_index} cannot run", problems=[problem]
            )
        return self._saved.pop(microbatch)

    def _run_backward(
        self, kind: OverlappedBackward, microbatch: int, output_gradients: Tensors
    ) -> Sequence[Tensor]:
        executable = self._computing[kind]
        saved = self._take_saved(microbatch, output_gradients, executable)
        inputs = [*self._static(executable), *output_gradients, *saved]
        del saved  # the list is emptied as it is used, so that memory is freed early
        place = self._recordings.place(microbatch)
        return executable.run_microbatch(inputs, self._gradients.sums, backward=place)

    def _keep_between(self, microbatch: int, results: Sequence[Tensor]) -> Tensors:
        self._between[microbatch] = list(results[self._num_leaving :])
        return tuple(results[: self._num_leaving])


# A stage's gradients in one step: summed over microbatches, then reduced over ranks, once.
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
