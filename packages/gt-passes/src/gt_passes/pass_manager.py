"""The pass manager: orders passes, runs them, verifies after each, recompiles once, and reports.

Everything that surrounds a pass is here, so that a pass is only its idea.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch.fx import GraphModule

from gt_passes._torch_internals import OpOverload, trace_structured
from gt_passes.analysis import liveness
from gt_passes.analysis.collectives import collective_bytes
from gt_passes.contract import GraphPass, PassContext, PassReport, check_declaration
from gt_passes.errors import VerificationError
from gt_passes.graph_problem import GraphProblem
from gt_passes.pass_manager_report import Elapsed, PassManagerReport, PassRecord
from gt_passes.verifier.declared_bounds import GraphSize, find_bound_problems
from gt_passes.verifier.verification_session import VerificationSession
from gt_trace.garbage_collection import held_garbage_collection
from gt_trace.graph_text import graph_text


class PassManager:
    """Runs passes on a graph, and holds each to what it declares.

    Args:
        passes: in the order in which they run.
        context: what passes need to know besides the graph.
        verify: verify the captured graph, and the graph after every pass.
        dump_directory: where to write the graph before and after each pass, as text, and a summary
            (``summary.txt``); made if it is missing. Ranks that share a file system need one each.
            The same goes to PyTorch's structured trace, if there is one (``TORCH_TRACE``).
        estimate_peak_bytes: an estimator of peak memory, for the report of every pass. None:
            ``gt_passes.analysis.liveness.estimate_peak_bytes``, of as many live microbatches as the
            context says, for every pass where there is a
            ``dump_directory``, else only where ``verify`` is on, a pass declares a bound, and what
            it did may hold something longer.
        summarize: what the report is to tell of the graph before all passes, and after those that
            generate no code: a call of what was compiled says little of what it does.

    Raises:
        PassDeclarationError: a pass breaks the contract.
    """

    def __init__(
        self,
        passes: Sequence[GraphPass],
        *,
        context: PassContext,
        verify: bool = True,
        dump_directory: Path | None = None,
        estimate_peak_bytes: Callable[[GraphModule], int] | None = None,
        summarize: Callable[[GraphModule], object] | None = None,
    ) -> None:
        for graph_pass in passes:
            check_declaration(type(graph_pass))
        self.passes = tuple(passes)
        self._context = context
        self._verify = verify
        self._dump_directory = dump_directory
        self._estimate_peak_bytes = estimate_peak_bytes or functools.partial(
            liveness.estimate_peak_bytes, num_live_microbatches=context.num_live_microbatches
        )
        self._summarize = summarize
        self._always_estimate = estimate_peak_bytes is not None or dump_directory is not None

    def run(self, graph_module: GraphModule) -> PassManagerReport:
        """Run all passes on ``graph_module``, in place, and recompile it.

        Raises:
            VerificationError: the graph is broken; names the pass after which it is. The graph
                module is then left as that pass left it, not recompiled, and must not be used.
            GraphInputError: the graph has no fake values.
        """
        with held_garbage_collection():
            return _Run(graph_module, self, passes=self.passes).run()

    def run_before_code(self, graph_module: GraphModule) -> PassManagerReport:
        """Run the passes up to the first that generates code, as ``run`` does.

        The graph then calls operators alone and can be stored; ``run_from_code`` goes on.

        Raises what ``run`` raises.
        """
        with held_garbage_collection():
            return _Run(graph_module, self, passes=self.passes[: self._num_before_code]).run()

    def run_from_code(
        self, graph_module: GraphModule, *, earlier: PassManagerReport, is_verified: bool = False
    ) -> PassManagerReport:
        """Run the passes from the first that generates code, in place, and recompile.

        Args:
            graph_module: as ``run_before_code`` left it, in this process or in one that stored it.
            earlier: what that returned.
            is_verified: whether it was verified in this process and not edited since. False, as for
                a graph that was loaded: it is verified before anything else.

        Returns:
            What ``run`` would have: the report on all passes.

        Raises what ``run`` raises.
        """
        passes = self.passes[self._num_before_code :]
        if is_verified and not passes:
            return earlier
        with held_garbage_collection():
            return _Run(
                graph_module, self, passes=passes, earlier=earlier, is_verified=is_verified
            ).run()

    @property
    def _num_before_code(self) -> int:
        """How many passes run before the first that generates code."""
        positions = (at for at, each in enumerate(self.passes) if each.generates_code)
        return next(positions, len(self.passes))


class _Run:
    """One run of passes on one graph: all that the manager has, or those on one side of a cut."""

    def __init__(
        self,
        graph_module: GraphModule,
        manager: PassManager,
        *,
        passes: Sequence[GraphPass],
        earlier: PassManagerReport | None = None,
        is_verified: bool = False,
    ) -> None:
        self._graph_module = graph_module
        self._manager = manager
        self._passes = passes
        self._earlier = earlier
        self._is_verified = is_verified
        self._num_earlier = 0 if earlier is None else len(earlier.records)
        self._session: VerificationSession | None = None
        self._summary_before: object = None
        self._summary_after: object = None

    def run(self) -> PassManagerReport:
        session = None
        self._summary_before = self._summary()
        with Elapsed() as capture_verification:
            if self._manager._verify:
                session = self._session = VerificationSession(
                    self._graph_module,
                    passes=self._passes,
                    same_groups=self._manager._context.same_groups,
                )
            if session is not None and self._is_verified:
                session.take_as_verified()
            elif session is not None:
                _raise_problems(
                    session.verify_capture(),
                    after="capture",
                    reproduce="gt_passes.Verifier().verify(graph_module)",
                )
        records = tuple(self._records())
        if all(not graph_pass.generates_code for graph_pass in self._passes):
            self._summary_after = self._summary()
        with Elapsed() as complete_verification:
            if session is not None and records:
                _raise_problems(
                    session.verify_completely(),
                    after="all passes",
                    reproduce="run Verifier().verify(graph_module) after each pass: one of them "
                    'changed a value in node.meta["val"] in place',
                )
        with Elapsed() as recompilation:
            self._graph_module.recompile()
        report = PassManagerReport(
            records=records,
            verified=session is not None,
            unverified=() if session is None else session.unverified,
            capture_verification=capture_verification,
            complete_verification=complete_verification,
            recompilation=recompilation,
            summary_before=self._summary_before,
            summary_after=self._summary_after,
        )
        if self._earlier is not None:
            report = self._earlier.followed_by(report)
        if self._manager._dump_directory is not None:
            self._manager._dump_directory.mkdir(parents=True, exist_ok=True)
            summary = f"{report}\n\n{report.differences()}"
            path = self._manager._dump_directory / "summary.txt"
            path.write_text(f"{summary}\n", encoding="utf-8")
            trace_text("graph_passes_summary", lambda: summary)
        return report

    def _summary(self) -> object:
        """None where passes ran before: their report has it, but that of a loaded graph."""
        summarize = self._manager._summarize
        if summarize is None or self._earlier is not None:
            return None
        return summarize(self._graph_module)

    def _records(self) -> Iterator[PassRecord]:
        before_ops = self._op_counts()
        before = self._size(before_ops)
        for position, graph_pass in enumerate(self._passes):
            if position == self._manager._num_before_code:
                self._summary_after = self._summary()
            always_estimate = self._manager._always_estimate
            with Elapsed() as estimation:
                if always_estimate and before.peak_memory_bytes is None:
                    before = self._with_peak(before, self._graph_module)
            dump_before = self._dump(position, graph_pass, "before")
            with Elapsed() as pass_time:
                report = self._run_pass(graph_pass)
            dump_after = self._dump(position, graph_pass, "after")
            after_ops = self._op_counts()
            after = self._size(after_ops)
            with Elapsed() as verification:
                problems = () if self._session is None else self._session.verify_pass(position)
                if self._session is not None and self._session.is_unchanged:
                    after = before
                elif not problems and (always_estimate or self._may_exceed_peak(graph_pass)):
                    if before.peak_memory_bytes is None:
                        assert self._session is not None  # it is that which asks
                        before = self._with_peak(before, self._session.graph_before())
                    after = self._with_peak(after, self._graph_module)
                if self._session is not None:
                    _raise_problems(
                        (*problems, *find_bound_problems(graph_pass, before, after)),
                        after=f"the pass {graph_pass.name}",
                        reproduce=self._reproduction(position, dump_before, dump_after),
                    )
            yield PassRecord(
                name=graph_pass.name,
                only_cleans_up=graph_pass.only_cleans_up,
                report=report,
                before=before,
                after=after,
                op_count_differences={
                    op: after_ops[op] - before_ops[op]
                    for op in sorted(before_ops | after_ops)
                    if after_ops[op] != before_ops[op]
                },
                elapsed=pass_time,
                verification=estimation + verification if self._session else Elapsed(),
                dump_before=dump_before,
                dump_after=dump_after,
            )
            before_ops, before = after_ops, after

    def _run_pass(self, graph_pass: GraphPass) -> PassReport:
        try:
            return graph_pass.run(self._graph_module, self._manager._context)
        except Exception as error:
            error.add_note(f"raised by the graph pass {graph_pass.name}: {graph_pass!r}")
            raise

    def _reproduction(
        self, position: int, dump_before: Path | None, dump_after: Path | None
    ) -> str:
        position += self._num_earlier
        earlier = ", ".join(graph_pass.name for graph_pass in self._manager.passes[:position])
        text = f"run {self._manager.passes[position]!r} on the captured graph"
        if earlier:
            text += f" after {earlier}"
        if dump_before is None:
            return f"{text}\n  PassManager(dump_directory=...) writes the graph before and after it"
        return f"{text}\n  and compare {dump_before} with {dump_after}"

    def _size(self, ops: Counter[str]) -> GraphSize:
        return GraphSize(
            num_ops=ops.total(),
            collective_bytes=collective_bytes(self._graph_module),
            peak_memory_bytes=None,
        )

    def _may_exceed_peak(self, graph_pass: GraphPass) -> bool:
        """Whether a pass that has run must be held to a peak of memory by an estimate.

        That costs as much as some passes do, and most are seen to hold nothing longer.
        """
        bounds = graph_pass.bounds
        if self._session is None or bounds.peak_memory_growth is None or bounds.only_removes:
            return False
        return not self._session.surely_holds_nothing_longer

    def _with_peak(self, size: GraphSize, graph_module: GraphModule) -> GraphSize:
        return replace(size, peak_memory_bytes=self._manager._estimate_peak_bytes(graph_module))

    def _op_counts(self) -> Counter[str]:
        by_target = Counter(
            node.target
            for node in self._graph_module.graph.nodes
            if node.op not in ("placeholder", "get_attr", "output")
        )
        by_name: Counter[str] = Counter()
        for target, count in by_target.items():
            by_name[_op_name(target)] += count
        return by_name

    def _dump(self, position: int, graph_pass: GraphPass, moment: str) -> Path | None:
        if self._manager._dump_directory is None:
            return None
        self._manager._dump_directory.mkdir(parents=True, exist_ok=True)
        position += self._num_earlier
        path = self._manager._dump_directory / f"{position:02d}-{graph_pass.name}-{moment}.txt"
        text = graph_text(self._graph_module)
        path.write_text(text, encoding="utf-8")
        trace_text(f"graph_pass_{position:02d}_{graph_pass.name}_{moment}", lambda: text)
        return path


def _raise_problems(problems: Sequence[GraphProblem], *, after: str, reproduce: str) -> None:
    if problems:
        raise VerificationError(after=after, problems=problems, reproduce=reproduce)


def _op_name(target: object) -> str:
    if isinstance(target, (OpOverload, str)):
        return str(target)
    return str(getattr(target, "__name__", target))


# Graphs and the summary of passes in PyTorch's structured trace, where ``tlparse`` shows them.
#
# With the environment variable ``TORCH_TRACE`` naming a folder, PyTorch writes one log a process
# there, in which each record may carry a text. ``tlparse FOLDER`` makes web pages of them.
# Without it, nothing is made and nothing is written.
def trace_text(name: str, text: Callable[[], str]) -> None:
    """Put a text into the trace, if there is one; ``text`` is not called without."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        # Passes run outside of torch.compile, which hands out the ids.
        expect_trace_id=False,
    )
