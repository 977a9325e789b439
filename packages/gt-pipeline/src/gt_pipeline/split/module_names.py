"""Which modules go to which stage, by number of layers.

The even division is that of torchtitan's core (torchtitan/distributed/pipeline_parallel.py), with
the names taken out of the code.
"""

from __future__ import annotations

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.split.layer_naming import LayerNaming
from gt_pipeline.split.lower_bounds import too_small


def module_names_per_stage(
    num_layers: int,
    *,
    num_stages: int,
    naming: LayerNaming,
    input_weight: int = 1,
    output_weight: int = 1,
) -> tuple[tuple[str, ...], ...]:
    """Divide layers evenly, what stands before and after them counted as layers.

    Stages differ by one counted layer at most; the first ones have more.

    Args:
        num_layers: layers of the model, numbered from 0.
        num_stages: stages of the whole pipeline.
        naming: what the model calls its parts.
        input_weight: layers that ``naming.first`` counts as.
        output_weight: layers that ``naming.last`` counts as.

    Returns:
        For each stage, names of modules in the order in which the model runs them, then those that
        every stage needs.

    Raises:
        StageLayoutError: the numbers do not fit together. Every reason is listed.
    """
    problems = too_small(1, num_layers=num_layers, num_stages=num_stages)
    problems += too_small(0, input_weight=input_weight, output_weight=output_weight)
    num_counted = num_layers + input_weight + output_weight
    if not problems and num_stages > 1:
        counted = f"{num_counted} layers counted with input_weight and output_weight"
        least = num_counted // num_stages
        if least == 0:
            problems.append(f"there are only {counted}: at most {num_counted} stages")
        else:
            problems += [
                f"{name} is {weight}, more than the {least} that a stage has of {counted}"
                for name, weight in (
                    ("input_weight", input_weight),
                    ("output_weight", output_weight),
                )
                if weight > least
            ]
    if problems:
        raise StageLayoutError(
            what=f"{num_layers} layers in {num_stages} stages", problems=problems
        )

    least, num_larger = divmod(num_counted, num_stages)
    layers = iter(naming.layer_names(num_layers))
    stages = []
    for stage in range(num_stages):
        num_here = least + (stage < num_larger)
        is_first, is_last = stage == 0, stage == num_stages - 1
        num_here -= input_weight * is_first + output_weight * is_last
        names = [next(layers) for _ in range(num_here)]
        if is_first:
            names = [*naming.first, *names]
        if is_last:
            names = [*names, *naming.last]
        stages.append((*names, *naming.every_stage))
    return tuple(stages)
