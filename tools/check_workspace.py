"""`make check-workspace`: every rule of the workspace, every violation at once.

Exits 0 and says what it looked at, or 1 after one line per violation.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from package_rules import PACKAGE_RULES
from source_rules import SOURCE_RULES
from workspace import Workspace, load_workspace


def violations(workspace: Workspace) -> Iterator[str]:
    """Every violation of every rule, in the order of the rules."""
    for rule in (*PACKAGE_RULES, *SOURCE_RULES):
        for message in rule(workspace):
            yield f"{rule.__name__}: {message}"


def main() -> int:
    """Checks the workspace that this file belongs to."""
    workspace = load_workspace(Path(__file__).resolve().parents[1])
    found = list(violations(workspace))
    for message in found:
        print(message, file=sys.stderr)
    print(
        f"workspace: {len(workspace.members)} packages, {len(workspace.tracked)} tracked files, "
        f"{len(found)} violations"
    )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
