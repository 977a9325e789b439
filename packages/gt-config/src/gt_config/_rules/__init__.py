"""Rules between fields. Each is one function that says what it reads and yields what is broken.

A rule never runs on a value that is wrong by itself (``_field_values``), so it may rely on types,
literal values and bounds. Violations are reported in the order of the imports below.
"""

# isort: off
from gt_config._rules import mesh
from gt_config._rules import autoparallel
from gt_config._rules import dependent_options
from gt_config._rules import accumulation
from gt_config._rules import float8
from gt_config._rules import names
from gt_config._rules import ep_overlap
from gt_config._rules import pipelines
from gt_config._rules.rule import RULES
# isort: on

__all__ = [
    "RULES",
    "accumulation",
    "autoparallel",
    "dependent_options",
    "ep_overlap",
    "float8",
    "mesh",
    "names",
    "pipelines",
]
