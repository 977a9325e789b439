"""The proof that a split loses no parameter and doubles none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from gt_pipeline.errors import StageNamesError, TiedParametersError
from gt_pipeline.split.named_parts import (
    Fate,
    lies_in,
    module_fates,
    name_problems,
    owned_names,
)
from gt_pipeline.split.shared_groups import (
    SharedGroup,
    group_problems,
    share_a_group,
    tied_parameters,
)


def check_cover(
    model: nn.Module,
    names_per_stage: Sequence[Sequence[str]],
    *,
    shared_groups: Sequence[SharedGroup] = (),
) -> Mapping[str, tuple[int, ...]]:
    """Check that each parameter lands on exactly one stage, or in a declared shared group.

    Modules without parameters may be on several stages, and must be on one at least.

    Args:
        model: the whole model, on any device.
        names_per_stage: for each stage, names of modules, or of parameters that a module which
            spans stages owns itself.
        shared_groups: parameters that may be on several stages.

    Returns:
        The stages of each parameter, by its name; tied names each have their own entry.

    Raises:
        StageNamesError: names are unknown or listed twice, or parameters are on no stage or on
            several. Every one is listed.
        TiedParametersError: the names are right, but tie parameters of several stages.
    """
    what = f"{type(model).__name__} on {len(names_per_stage)} stages"
    problems = group_problems(model, shared_groups)
    for stage, names in enumerate(names_per_stage):
        problems += [f"stage {stage}: {problem}" for problem in name_problems(model, names)]
        if not names:
            problems.append(f"stage {stage} lists no name")
    if problems:
        raise StageNamesError(what=what, problems=problems)

    stages_of = {
        name: tuple(stage for stage, names in enumerate(names_per_stage) if lies_in(name, names))
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    problems = _uncovered(model, names_per_stage)
    shared = {name for group in shared_groups for name in group.names}
    for name, stages in stages_of.items():
        if len(stages) > 1 and name not in shared:
            problems.append(
                f"parameter {name!r} is on stages {_join(stages)}: list it once, or declare "
                f"SharedGroup(({name!r},))"
            )
    ties = []
    for names in tied_parameters(model):
        stages = tuple(sorted({stage for name in names for stage in stages_of[name]}))
        if len(stages) > 1 and not share_a_group(names, shared_groups):
            ties.append(_tie(names, stages_of))
    if problems:
        raise StageNamesError(what=what, problems=[*problems, *ties])
    if ties:
        raise TiedParametersError(what=what, problems=ties)
    return stages_of


def _uncovered(model: nn.Module, names_per_stage: Sequence[Sequence[str]]) -> list[str]:
    """What is on no stage, named as high up in the model as it can be."""
    listed = [name for names in names_per_stage for name in names]
    fates = module_fates(model, listed)
    problems = []
    for name, module in model.named_modules(remove_duplicate=False):
        parent = fates.get(name.rpartition(".")[0])
        if fates[name] is Fate.DROPPED and parent is Fate.PARTIAL:
            count = len(list(module.parameters()))
            advice = "" if count else ": list it on each stage that needs it"
            problems.append(
                f"{name!r} ({type(module).__name__}, {count or 'no'} "
                f"{'parameter' if count == 1 else 'parameters'}) is on no stage{advice}"
            )
        elif fates[name] is Fate.PARTIAL:
            own = {each for each, _ in module.named_parameters(recurse=False)}
            prefix = f"{name}." if name else ""
            problems += [
                f"parameter {prefix + each!r} is on no stage"
                for each in owned_names(module)
                if each in own and not lies_in(prefix + each, listed)
            ]
    return problems


def _tie(names: Sequence[str], stages_of: Mapping[str, tuple[int, ...]]) -> str:
    where = ", ".join(f"{name!r} on stage {_join(stages_of[name])}" for name in names)
    return (
        f"{where} are one parameter: put them on one stage, or declare "
        f"SharedGroup({tuple(names)!r})"
    )


def _join(stages: Sequence[int]) -> str:
    return " and ".join(map(str, stages)) or "none"
