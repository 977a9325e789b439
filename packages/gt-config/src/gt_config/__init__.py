"""Configuration, validation, fingerprints and node-metadata keys of Graph Trainer.

Standard library only: importing this package loads neither torch nor any of its siblings, so that
a launcher can judge a configuration before it pays for either. The node-metadata contract has its
own module, ``gt_config.node_keys``, because only those who touch graphs need it.
"""

from gt_config.compile_config import (
    Accumulation,
    AutoParallelConfig,
    CaptureLayers,
    CompileConfig,
    ContextParallelStrategy,
    EpChunkDim,
    EpOverlapConfig,
    ExpertPlacement,
    JointPartitioner,
    MemoryPolicy,
    ShapeChangePolicy,
)
from gt_config.errors import ConfigError, Violation
from gt_config.fingerprint import Fingerprint, explain_difference, fingerprint, refuse_stale
from gt_config.graph_neutral import graph_neutral
from gt_config.selectors import SavedOpSelector
from gt_config.topology import Topology
from gt_config.validate import find_violations, malformed_options, validate

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "AutoParallelConfig",
    "CaptureLayers",
    "CompileConfig",
    "ConfigError",
    "ContextParallelStrategy",
    "EpChunkDim",
    "EpOverlapConfig",
    "ExpertPlacement",
    "Fingerprint",
    "JointPartitioner",
    "MemoryPolicy",
    "SavedOpSelector",
    "ShapeChangePolicy",
    "Topology",
    "Violation",
    "explain_difference",
    "find_violations",
    "fingerprint",
    "graph_neutral",
    "malformed_options",
    "refuse_stale",
    "validate",
]
