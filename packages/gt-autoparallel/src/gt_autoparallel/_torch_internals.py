"""Every private symbol of PyTorch that this package uses, in one place, with the reason for each.

Checked against the installed source of torch 2.15; a new PyTorch is checked here and nowhere else.
"""

from __future__ import annotations

from torch._ops import OpOverload

__all__ = ["OpOverload", "operator_path"]

# ``OpOverload`` is the type of what stands in the nodes of a captured graph; it has no public name.


def operator_path(operator: OpOverload) -> tuple[str, str, str]:
    """Namespace, name and overload of an operator: ``torch.ops`` finds it again by these.

    The schema is private, but the only place that spells an overload's name apart from its
    operator's.
    """
    namespace, _, name = operator._schema.name.partition("::")
    return namespace, name, operator._overloadname
