"""Passes that are faster and round differently; they run only with ``--compile.numerics_changing``.

Kept apart so that nobody takes one for a pass that keeps the bits: every pass here has
``preserves_numerics = False`` and states its tolerance.
"""

from gt_passes.passes.numerics_changing.fuse_parallel_matmuls import FuseParallelMatmuls

__all__ = ["FuseParallelMatmuls"]
