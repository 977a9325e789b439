"""Pipeline parallelism: split any model into stages, build and study schedules, run stage graphs.

`gt_pipeline.split`, `gt_pipeline.schedules` and `gt_pipeline.runner` need torch, and names out of
gt-config. `gt_pipeline.graph` (stages captured as graphs) needs what the extra `gt-pipeline[graph]`
brings. Errors are in `gt_pipeline.errors`.
"""

__version__ = "0.1.0"
