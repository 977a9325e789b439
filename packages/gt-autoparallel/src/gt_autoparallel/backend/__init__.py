"""What is done to the captured step of a placed model in mode ``autoparallel_backend``.

::

    recipe                the passes, in order
    tag_to_memory_budget  recompute the cheapest until the step fits
    overlap_collectives   collectives start early and end late
"""

from gt_autoparallel.backend.recipe import backend_passes

__all__ = ["backend_passes"]
