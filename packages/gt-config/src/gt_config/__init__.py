"""Configuration, validation, fingerprints and node-metadata keys of Graph Trainer.

Standard library only: importing this package loads neither torch nor any of its siblings, so that
a launcher can judge a configuration before it pays for either. The node-metadata contract has its
own module, ``gt_config.node_keys``, because only those who touch graphs need it.
"""

from gt_config.compile_config import (
    AutoParallelConfig,
    CaptureLayers,
    CompileConfig,
    EpChunkDim,
    EpChunkStrategy,
    EpModuleFqn,
    EpOverlapConfig,
    ExpertPlacement,
    FsdpBucketing,
    InductorCompilation,
    JointPartitioner,
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
from gt_config.fingerprint import (
    FINGERPRINT_FORMAT,
    Fingerprint,
    explain_difference,
    fingerprint,
    refuse_stale,
)
from gt_config.graph_neutral import graph_neutral, is_graph_neutral
from gt_config.selectors import (
    MODULE_PATTERN_SYNTAX,
    SELECTOR_SYNTAX,
    SavedOpSelector,
    is_module_pattern,
)
from gt_config.topology import TOPOLOGY_FLAGS, Topology
from gt_config.validate import find_violations, malformed_options, validate

__all__ = [
    "FINGERPRINT_FORMAT",
    "MODULE_PATTERN_SYNTAX",
    "SELECTOR_SYNTAX",
    "TOPOLOGY_FLAGS",
    "AutoParallelConfig",
    "CaptureLayers",
    "CompileConfig",
    "ConfigError",
    "EpChunkDim",
    "EpChunkStrategy",
    "EpModuleFqn",
    "EpOverlapConfig",
    "ExpertPlacement",
    "FieldDifference",
    "Fingerprint",
    "FingerprintDocumentError",
    "FingerprintTypeError",
    "FsdpBucketing",
    "GtConfigError",
    "InductorCompilation",
    "JointPartitioner",
    "MemoryPolicy",
    "Mode",
    "NodeMetadataError",
    "NodeMetadataVersionError",
    "SavedOpSelector",
    "SelectorSyntaxError",
    "ShapeChangePolicy",
    "StaleFingerprintError",
    "Topology",
    "Violation",
    "explain_difference",
    "find_violations",
    "fingerprint",
    "graph_neutral",
    "is_graph_neutral",
    "is_module_pattern",
    "malformed_options",
    "refuse_stale",
    "validate",
]
