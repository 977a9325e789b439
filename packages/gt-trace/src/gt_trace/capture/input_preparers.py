"""Hooks that change the inputs of a trace, without the tracer knowing why.

For callers of ``trace_step``, ``export_joint_graph`` and gt-pipeline's ``capture_stage``: to mark a
dimension dynamic before inputs are faked, or to change inputs as a part of the graph. No package of
this project brings one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInputs:
    """The arguments of the traced function, as given: trees of tensors and plain values.

    A joint graph is traced of its module. A pipeline stage is traced of a function of (activations,
    args, kwargs, target, gradients of outputs); it is traced twice.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class InputPreparer:
    """Base of the hooks. Override one method or both; each returns the inputs to use instead.

    Preparers run in the order in which they are given to ``trace_step``.
    """

    def before_faking(self, inputs: TraceInputs) -> TraceInputs:
        """Change the real inputs, or mark their dimensions as dynamic.

        Marking is ``torch._dynamo.mark_dynamic`` or ``mark_unbacked``. The structure returned is
        the one that callers of the captured step must use. A step that installs hooks of modules is
        captured twice, and its inputs are prepared twice, each time from those given.
        """
        return inputs

    def inside_trace(self, inputs: TraceInputs) -> TraceInputs:
        """Change the fake inputs while the trace runs.

        What it computes becomes part of the graph; callers of the captured step see no change.
        """
        return inputs
