"""Copies the part of a model that one stage keeps.

The copy is a deep copy in which every dropped module and parameter is replaced before it is
reached, so that none of them is ever copied: splitting costs the memory of what is kept. Names of
what is kept stay those of the whole model, also in containers (torchtitan's core renumbers a
ModuleList), so that checkpoints of stages are parts of the checkpoint of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from gt_pipeline.errors import StageNamesError, TiedParametersError
from gt_pipeline.split.cover import check_cover
from gt_pipeline.split.named_parts import (
    Fate,
    children_of,
    is_container,
    lies_in,
    module_fates,
    name_problems,
)
from gt_pipeline.split.removal import DEFAULT_POLICY, PassThrough, RemovalPolicy, Replacement
from gt_pipeline.split.shared_groups import (
    SharedGroup,
    group_problems,
    share_a_group,
    tied_parameters,
)


def split_module(
    model: nn.Module,
    names: Sequence[str],
    *,
    policy: RemovalPolicy = DEFAULT_POLICY,
    shared_groups: Sequence[SharedGroup] = (),
) -> nn.Module:
    """The stage of ``model`` that keeps what ``names`` lists.

    ::

        model                          split_module(model, ["layers.2", "layers.3"])
        ├── tok_embeddings             ├── tok_embeddings = None
        ├── layers                     ├── layers
        │   ├── 0 ... 3                │   └── 2, 3       under these names
        └── norm                       └── norm = None

    A module that only parts of are listed of stays as a shell: its own buffers are copied, its own
    parameters only if listed. A container with nothing listed in it stays, empty.

    Args:
        model: the whole model, unchanged by this; on the meta device, too.
        names: qualified names of modules, or of parameters that a shell owns.
        policy: what replaces a dropped child.
        shared_groups: parameters that may stand on several stages.

    Returns:
        A copy that shares no memory with ``model``.

    Raises:
        StageNamesError: names are unknown, listed twice, or lie in one another; or a replacement
            has parameters.
        TiedParametersError: a parameter that is kept is tied to one that is dropped.
    """
    what = f"stage of {type(model).__name__} with {', '.join(map(repr, names)) or 'no names'}"
    problems = [*name_problems(model, names), *group_problems(model, shared_groups)]
    if not names:
        problems.append("the stage is empty")
    if problems:
        raise StageNamesError(what=what, problems=problems)
    ties = list(_torn_ties(model, names, shared_groups))
    if ties:
        raise TiedParametersError(what=what, problems=ties)

    fates = module_fates(model, names)
    stage = copy.deepcopy(model, _memo_of_dropped(model, fates, names))
    problems = list(_prune(model, stage, fates=fates, names=names, policy=policy))
    if problems:
        raise StageNamesError(what=what, problems=problems)
    return stage


def stage_modules(
    model: nn.Module,
    names_per_stage: Sequence[Sequence[str]],
    stage_indices: Iterable[int],
    *,
    policy: RemovalPolicy = DEFAULT_POLICY,
    shared_groups: Sequence[SharedGroup] = (),
) -> Mapping[int, nn.Module]:
    """The stages of one rank, by stage index, after a check that all stages cover the model.

    Raises:
        StageNamesError: as :func:`check_cover`, or for a stage that does not exist.
        TiedParametersError: as :func:`check_cover`.
    """
    check_cover(model, names_per_stage, shared_groups=shared_groups)
    wanted = tuple(stage_indices)
    unknown = [stage for stage in wanted if not 0 <= stage < len(names_per_stage)]
    if unknown:
        raise StageNamesError(
            what=f"stages {wanted}",
            problems=[
                f"there is no stage {stage}: stages are 0 to {len(names_per_stage) - 1}"
                for stage in unknown
            ],
        )
    return {
        stage: split_module(
            model, names_per_stage[stage], policy=policy, shared_groups=shared_groups
        )
        for stage in wanted
    }


class _Dropped(nn.Module):
    """Holds the place of a dropped module while its parent is copied.

    It goes before the stage is handed out, unless some object keeps a reference of its own to the
    module (in a list, say), which then holds this.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.name!r} is on another pipeline stage")


def _torn_ties(
    model: nn.Module, names: Sequence[str], shared_groups: Sequence[SharedGroup]
) -> Iterable[str]:
    for tied in tied_parameters(model):
        kept = [name for name in tied if lies_in(name, names)]
        if kept and len(kept) < len(tied) and not share_a_group(tied, shared_groups):
            dropped = [name for name in tied if name not in kept]
            yield (
                f"{', '.join(map(repr, kept))} would stay and {', '.join(map(repr, dropped))} go, "
                "but they are one parameter: put them on one stage, or declare "
                f"SharedGroup({tied!r})"
            )


def _memo_of_dropped(
    model: nn.Module, fates: Mapping[str, Fate], names: Sequence[str]
) -> dict[int, object]:
    """What ``copy.deepcopy`` takes as already copied: a stand-in for whatever is dropped."""
    modules = list(model.named_modules(remove_duplicate=False))
    kept_modules = {id(module) for name, module in modules if fates[name] is not Fate.DROPPED}
    kept_tensors: set[int] = set()
    for name, module in modules:
        if fates[name] is not Fate.DROPPED:
            kept_tensors.update(map(id, module.buffers(recurse=False)))
            kept_tensors.update(map(id, _kept_parameters(name, module, fates, names)))
    memo: dict[int, object] = {}
    for name, module in modules:
        if id(module) not in kept_modules:
            memo[id(module)] = _Dropped(name)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in kept_tensors:
                memo[id(parameter)] = nn.Parameter(torch.empty(0), requires_grad=False)
        for buffer in module.buffers(recurse=False):
            if id(buffer) not in kept_tensors:
                memo[id(buffer)] = torch.empty(0)
    return memo


def _kept_parameters(
    name: str, module: nn.Module, fates: Mapping[str, Fate], names: Sequence[str]
) -> list[nn.Parameter]:
    prefix = f"{name}." if name else ""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return [
        parameter
        for each, parameter in own
        if fates[name] is Fate.KEPT or lies_in(prefix + each, names)
    ]


def _prune(
    model: nn.Module,
    stage: nn.Module,
    *,
    fates: Mapping[str, Fate],
    names: Sequence[str],
    policy: RemovalPolicy,
) -> Iterable[str]:
    """Take the stand-ins out of the shells of ``stage``; yields what is wrong."""
    names_of_shell: dict[nn.Module, list[str]] = {}
    for name, whole in model.named_modules(remove_duplicate=False):
        if fates[name] is Fate.PARTIAL:
            names_of_shell.setdefault(whole, []).append(name)
    for whole, shell_names in names_of_shell.items():
        # A shell that stands under several names keeps what is kept under any of them.
        name = shell_names[0]
        prefixes = [f"{each}." if each else "" for each in shell_names]
        shell = stage.get_submodule(name)
        for own, _ in whole.named_parameters(recurse=False, remove_duplicate=False):
            if not any(lies_in(prefix + own, names) for prefix in prefixes):
                setattr(shell, own, None)
        replacement = policy.entry if is_container(whole) else policy.attribute
        num_deleted = 0
        for child_name, child in children_of(whole).items():
            if any(fates[prefix + child_name] is not Fate.DROPPED for prefix in prefixes):
                continue
            if replacement == "delete":
                delattr(shell, child_name)
                num_deleted += 1
                continue
            new = _replacement_of(replacement, prefixes[0] + child_name, child)
            if new is not None and next(new.parameters(), None) is not None:
                yield f"the replacement of {prefixes[0] + child_name!r} has parameters of its own"
            setattr(shell, child_name, new)
        if num_deleted and len(shell) != len(whole) - num_deleted:  # type: ignore[arg-type] # a container
            yield (
                f"{name!r} ({type(whole).__name__}) keeps its own record of its children: "
                "deleting entries does not shorten it; use RemovalPolicy(entry='identity')"
            )


def _replacement_of(replacement: Replacement, name: str, child: nn.Module) -> nn.Module | None:
    if callable(replacement):
        return replacement(name, child)
    return PassThrough() if replacement == "identity" else None
