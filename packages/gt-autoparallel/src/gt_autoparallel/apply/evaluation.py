"""Evaluation of a placed model: it runs the planned forward, where that is what it would compute.

A plan is for one mode, since layers may compute something else in the other (dropout, statistics of
batches). Most layers of large models do not. So evaluation is captured once more, from a model that
is not placed, and compared: if it is the graph that was planned, the placed model may run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gt_autoparallel.apply.placed_forward import PlacedForward
from gt_autoparallel.argument_checks import check_arguments, kind_problem
from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.experts import ExpertBlock, expert_problems, opaque_experts
from gt_autoparallel.plan.model_signature import graph_differences, interface_differences


def allow_evaluation(
    placed: nn.Module,
    whole: nn.Module,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    experts: Mapping[str, ExpertBlock] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Let a placed model run in evaluation mode too, on inputs as planned.

    ::

        with torch.device("meta"):
            whole = build_model()
        allow_evaluation(placed, whole, (tokens,))
        placed.eval()

    Args:
        placed: by ``apply_plan``.
        whole: the same model, not placed; on meta it takes no memory. Its modes are left as they
            are.
        example_inputs: with which ``placed`` was planned, as all that follows.
        example_kwargs: keyword arguments, likewise.
        compute_dtype: dtype to which parameters are cast for use.
        reduce_dtype: dtype in which gradients of cast parameters are summed over ranks.
        experts: routed experts of ``whole``, by the names of their modules.
        device: for whose kernels the graph is captured.

    Raises:
        PlanMismatchError: in evaluation mode the model computes, takes or returns something else
            than was planned; names where.
        PlacementInputError: an argument is not what it must be; each is named.
        UnsupportedModelError: ``whole`` cannot be captured.
    """
    forward = getattr(placed, "forward", None)
    check_arguments(
        "allow_evaluation",
        None
        if isinstance(forward, PlacedForward)
        else "placed is no placed model; allowed: one that apply_plan placed",
        "whole is placed; allowed: the same model, not placed"
        if isinstance(getattr(whole, "forward", None), PlacedForward)
        else kind_problem(whole, "whole", nn.Module, "the same torch.nn.Module, not placed"),
        *expert_problems(experts),
    )
    assert isinstance(forward, PlacedForward)
    plan = forward.plan
    with _in_evaluation_mode(whole), opaque_experts(whole, experts or {}):
        graph = capture_placement_graph(
            whole,
            example_inputs,
            example_kwargs,
            device=device,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            allowed_random_operators=plan.request.replicate_unknown,
        )
    assert graph.interface is not None  # of a graph that was captured here
    # A plan from another process has no interface of its own; the one that runs is the forward's.
    differences = graph_differences(plan.graph, graph) or interface_differences(
        forward.interface, graph.interface
    )
    if differences:
        raise PlanMismatchError(
            "in evaluation mode, with these inputs and dtypes, the model computes something else "
            "than was planned, and a placed model runs what was planned:\n  "
            + "\n  ".join(differences)
        )
    forward.may_evaluate = True


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training
