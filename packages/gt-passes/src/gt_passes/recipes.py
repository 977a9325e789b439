"""Recipes: which passes run on the graphs of a mode, with what a user added or left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from torch.fx import GraphModule

from gt_passes.contract import GraphPass, PassContext
from gt_passes.errors import RecipeError
from gt_passes.passes import CanonicalizeViews, RemoveDeadCode, ShareAllGathers
from gt_passes.pipeline import PassPipeline
from gt_passes.registry import find_passes

__all__ = ["default_recipe"]


def default_recipe(
    *,
    context: PassContext,
    passes: Sequence[str] = (),
    disable_passes: Sequence[str] = (),
    verify: bool = True,
    dump_directory: Path | None = None,
    estimate_peak_bytes: Callable[[GraphModule], int] | None = None,
) -> PassPipeline:
    """The pipeline for a whole captured step (mode ``aot_fx_trace``).

    Remove dead code, canonicalize views, one all-gather chain per parameter.

    Args:
        context: of the graph to run on.
        passes: registered names of passes to run after those of the recipe, in this order and with
            their default options; a pass of the recipe then runs a second time.
        disable_passes: registered names of passes of the recipe to leave out.
        verify: as for ``PassPipeline``.
        dump_directory: as for ``PassPipeline``.
        estimate_peak_bytes: as for ``PassPipeline``.

    Raises:
        UnknownPassError: a name that no registered pass has.
        RecipeError: a pass left out is not part of the recipe, or is added as well; or a pass added
            by name has an option without a default. All of them at once.
        PassOrderError: what was left out provides what another pass requires.
    """
    recipe: list[GraphPass] = [RemoveDeadCode(), CanonicalizeViews(), ShareAllGathers()]
    find_passes([*passes, *disable_passes])  # all unknown names in one error
    in_recipe = [graph_pass.name for graph_pass in recipe]
    added = find_passes(passes)
    problems = [
        f"{name!r} is disabled, and the recipe has only {', '.join(in_recipe)}"
        for name in disable_passes
        if name not in in_recipe
    ]
    problems += [
        f"{name!r} is both added and disabled" for name in disable_passes if name in passes
    ]
    for pass_class in added:
        needed = _options_without_default(pass_class)
        if needed:
            problems.append(
                f"{pass_class.name!r} cannot be added by name, for want of {', '.join(needed)}: "
                "give PassPipeline an instance"
            )
    if problems:
        raise RecipeError(problems)
    kept = [graph_pass for graph_pass in recipe if graph_pass.name not in disable_passes]
    return PassPipeline(
        [*kept, *(pass_class() for pass_class in added)],
        context=context,
        verify=verify,
        dump_directory=dump_directory,
        estimate_peak_bytes=estimate_peak_bytes,
    )


def _options_without_default(pass_class: type[GraphPass]) -> list[str]:
    # check_declaration has made sure that a registered pass is a dataclass.
    return [
        option.name
        for option in fields(pass_class)  # type: ignore[arg-type]  # GraphPass itself is none
        if option.default is MISSING and option.default_factory is MISSING
    ]
