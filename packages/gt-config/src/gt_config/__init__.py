"""Configuration, validation, fingerprints and node-metadata keys of Graph Trainer.

Standard library only: importing this package loads neither torch nor any of its siblings, so that
a launcher can judge a configuration before it pays for either.
"""

from gt_config.compile_config import (
    AutoParallelConfig,
    CompileConfig,
    EpChunkDim,
    EpChunkStrategy,
    EpModuleFqn,
    EpOverlapConfig,
    FsdpBucketing,
    InductorCompilation,
    MemoryPolicy,
    Mode,
    ShapeChangePolicy,
)
from gt_config.errors import (
    ConfigError,
    FieldDifference,
    FingerprintDocumentError,
    FingerprintTypeError,
    GtConfigError,
    NodeMetadataError,
    NodeMetadataVersionError,
    SelectorSyntaxError,
    StaleFingerprintError,
    Violation,
)
from gt_config.graph_neutral import graph_neutral, is_graph_neutral
from gt_config.topology import TOPOLOGY_FLAGS, Topology

__all__ = [
    "TOPOLOGY_FLAGS",
    "AutoParallelConfig",
    "CompileConfig",
    "ConfigError",
    "EpChunkDim",
    "EpChunkStrategy",
    "EpModuleFqn",
    "EpOverlapConfig",
    "FieldDifference",
    "FingerprintDocumentError",
    "FingerprintTypeError",
    "FsdpBucketing",
    "GtConfigError",
    "InductorCompilation",
    "MemoryPolicy",
    "Mode",
    "NodeMetadataError",
    "NodeMetadataVersionError",
    "SelectorSyntaxError",
    "ShapeChangePolicy",
    "StaleFingerprintError",
    "Topology",
    "Violation",
    "graph_neutral",
    "is_graph_neutral",
]
