"""What stored graphs need to know of a model that a solver placed: its plan, and its groups.

Asked for a model that no plan places, everything here is empty, and the solver is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from gt_config import CompileConfig


def identity_of_plan(
    options: CompileConfig, model: nn.Module, renamed: Callable[[str], str] = str
) -> str | None:
    """The digest of what the plan of a model, or of a stage, decides; None without a plan.

    ``renamed`` gives names of layers, in a text, other names: those that alike stages have.
    """
    if not options.autoparallel:
        return None
    from gt_autoparallel import placed_model, plan_digest

    placed = placed_model(model)
    return None if placed is None else plan_digest(placed.plan, renamed=renamed)


def expert_groups(options: CompileConfig, model: nn.Module) -> dict[str, str]:
    """Names of the process groups over several axes in which experts exchange tokens, by labels.

    Groups of one axis are that axis of the mesh. The labels are the same on every rank.
    """
    return {
        _over(axes): group.group_name
        for axes, group in _exchange_groups(options, [model]).items()
        if len(axes) > 1
    }


def exchange_groups(
    options: CompileConfig, parts: Sequence[nn.Module]
) -> dict[str, dist.ProcessGroup]:
    """All process groups in which experts of the parts exchange tokens, by labels.

    The labels and their order are the same on every rank, also of a pipeline, for every stage has
    the groups of all.
    """
    return {_over(axes): group for axes, group in _exchange_groups(options, parts).items()}


def keeps_all_tokens(options: CompileConfig, parts: Sequence[nn.Module]) -> bool:
    """Whether there are placed experts, and those of no part exchange tokens."""
    if not options.autoparallel:
        return False
    from gt_autoparallel import placed_model

    placed = [each for each in map(placed_model, parts) if each is not None]
    has_experts = any(each.plan.graph.of_kind("experts") for each in placed)
    return has_experts and not any(each.expert_meshes for each in placed)


def _over(axes: Sequence[str]) -> str:
    return f"experts over {' and '.join(axes)}"


def _exchange_groups(
    options: CompileConfig, parts: Sequence[nn.Module]
) -> dict[tuple[str, ...], dist.ProcessGroup]:
    if not options.autoparallel:
        return {}
    from gt_autoparallel import placed_model

    placed = (placed_model(part) for part in parts)
    return {
        axes: mesh.get_group()
        for each in placed
        if each is not None
        for axes, mesh in each.expert_meshes.items()
    }


def planned_groups(
    options: CompileConfig, parts: Sequence[nn.Module]
) -> dict[str, dist.ProcessGroup]:
    """The process groups of the axes of the planned mesh, by name; all parts have one mesh."""
    if not options.autoparallel:
        return {}
    from gt_autoparallel import placed_model

    for part in parts:
        placed = placed_model(part)
        if placed is not None:
            names = placed.mesh.mesh_dim_names or ()
            return {name: placed.mesh.get_group(dim) for dim, name in enumerate(names)}
    return {}
