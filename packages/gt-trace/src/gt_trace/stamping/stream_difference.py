"""Whether layers compute alike: the second gate before stamping."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gt_trace.stamping.layer_difference import LayerComparison
from gt_trace.stamping.layer_list import LayerList
from gt_trace.stamping.planned_layers import PlannedLayers
from gt_trace.stamping.recordings import BEFORE, LayerSegment, StreamRecording, Vocabulary
from gt_trace.stamping.report import NotStampable, ReachesTooFar


def require_equal_streams(
    recording: StreamRecording, planned: PlannedLayers, *, known_functions: Collection[str]
) -> None:
    """All units of the interior compute the same, seen from each.

    An operand comes from the same place in all units, or from the same distance. No stream tells
    what the backward of a custom autograd function does, so that only known ones may be in a unit.

    Raises:
        NotStampable: the first difference.
    """
    layers, plan = planned.layers, planned.plan
    for layer in range(plan.layer(plan.first), plan.layer(plan.last + 1)):
        for function in recording.segments[layer].functions:
            if function.__module__.partition(".")[0] not in known_functions:
                raise NotStampable(
                    f"{layers.name(layer)} runs {function.__module__}.{function.__qualname__}, "
                    "whose backward is not known to be the same in all layers"
                )
    wanted = _wanted_gradients(recording, layers)
    for layer in range(plan.layer(plan.first + 1), plan.layer(plan.last + 1)):
        model = planned.counterpart(layer)
        if wanted.get(layer) != wanted.get(model):
            raise NotStampable(
                f"the step asks for gradients of other parameters of {layers.name(layer)} than of "
                f"{layers.name(model)}"
            )
        _compare(
            recording.segments[model],
            recording.segments[layer],
            what=f"{layers.name(layer)} computes otherwise than {layers.name(model)}",
            distance=layer - model,
            comparison=LayerComparison(layers=layers, first=model, second=layer),
            vocabulary=recording.vocabulary,
        )


def _wanted_gradients(recording: StreamRecording, layers: LayerList) -> dict[int, set[str]]:
    """For each layer: names in it of what the step returns gradients of."""
    wanted: dict[int, set[str]] = {}
    for leaf in recording.outputs:
        index, name = layers.split(leaf.gradient_of or "")
        if index is not None:
            wanted.setdefault(index, set()).add(name)
    return wanted


def require_same_when_short(
    full: StreamRecording, short: StreamRecording, planned: PlannedLayers
) -> None:
    """What the shortened model computes is what the whole one does in the same layers.

    So nothing depends on how many layers there are, or is collected over them.

    Raises:
        NotStampable: the first difference.
    """
    layers, plan = planned.layers, planned.plan
    for layer in (BEFORE, *plan.kept):
        is_last_unit = plan.unit_of(layer) == plan.last and layer != BEFORE
        where = "before the layers" if layer == BEFORE else layers.name(layer)
        if layer == plan.num_layers - 1:
            where = f"{where} and what follows"
        _compare(
            full.segments[layer],
            short.segments[layer],
            what=f"{where} computes otherwise in a model of fewer layers",
            # The unit before the last one of the interior is the first one in the short model.
            distance=-plan.num_stamped * plan.period if is_last_unit else 0,
            comparison=LayerComparison(layers=layers, first=layer, second=layer),
            vocabulary=full.vocabulary,
            too_far=layer >= plan.layer(plan.last + 1),
        )


def _compare(
    ours: LayerSegment,
    theirs: LayerSegment,
    *,
    what: str,
    distance: int,
    comparison: LayerComparison,
    vocabulary: Vocabulary,
    too_far: bool = False,
) -> None:
    """Operands come from the same place in the same layer, or in one ``distance`` layers on."""
    if ours.tokens != theirs.tokens:
        for index, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
            if one != other:
                names = vocabulary.name(one), vocabulary.name(other)
                raise NotStampable(
                    f"{what}: step {index} is {names[1]}, not {names[0]}"
                    if names[0] != names[1]
                    else f"{what}: {names[0]}, step {index}, has other operands"
                )
        raise NotStampable(f"{what}: {len(theirs.tokens)} steps, not {len(ours.tokens)}")
    for origin, other_origin in zip(ours.origins, theirs.origins, strict=True):
        same_layer = origin.layer == other_origin.layer or (
            origin.layer is not None
            and other_origin.layer is not None
            and other_origin.layer - origin.layer == distance
        )
        if origin.place != other_origin.place or not same_layer:
            error = ReachesTooFar if too_far else NotStampable
            raise error(f"{what}: an operand comes from elsewhere")
    for (function, held), (_, others) in zip(ours.contexts, theirs.contexts, strict=True):
        # Ours name the parameters that they gather; others may look something up by a name.
        is_ours = function is not None and function.__module__.startswith("gt_trace.")
        chosen = comparison if is_ours else replace(comparison, relative_names=False)
        found = chosen.value(" backward of a custom function", held, others)
        if found is not None:
            raise NotStampable(found)
