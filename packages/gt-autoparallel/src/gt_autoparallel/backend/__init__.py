"""What is done to the captured step of a placed model in mode ``autoparallel_backend``.

::

    recipe                the passes, in order
    tag_to_memory_budget  recompute the cheapest until the step fits
    overlap_collectives   collectives start early and end late
"""

from gt_autoparallel.backend.overlap_collectives import OverlapCollectives
from gt_autoparallel.backend.recipe import backend_passes
from gt_autoparallel.backend.tag_to_memory_budget import TagToMemoryBudget

__all__ = ["OverlapCollectives", "TagToMemoryBudget", "backend_passes"]
