"""Which transformer layer a node belongs to, by the name of its module.

Where layers begin and end is data: a pattern of module names, as ``layers.*``. What lies inside a
matched module belongs to its layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.fx import Node

from gt_trace.node_metadata import module_fqn


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Finds layers by a pattern; remembers what it found.

    Args:
        pattern: dotted module name; an asterisk stands for any characters within one component.
    """

    pattern: str = "layers.*"
    _known: dict[str, str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def layer_of(self, node: Node) -> str | None:
        """The name of the layer that a node belongs to, as ``layers.7``; None outside layers."""
        return self.layer_of_name(module_fqn(node))

    def layer_of_name(self, fqn: str) -> str | None:
        """The layer in which a module, parameter or buffer of this fully qualified name lies."""
        if fqn not in self._known:
            self._known[fqn] = self._layer(fqn)
        return self._known[fqn]

    def _layer(self, fqn: str) -> str | None:
        patterns, components = self.pattern.split("."), fqn.split(".")
        if len(components) < len(patterns):
            return None
        leading = components[: len(patterns)]
        if not all(map(fnmatchcase, leading, patterns)):
            return None
        return ".".join(leading)
