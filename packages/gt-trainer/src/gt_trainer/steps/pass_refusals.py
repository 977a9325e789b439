"""What passes left alone, said briefly to whoever asked for them.

Passes that clean up refuse often, and nobody asked for a certain place of theirs. The others carry
out an option, and where one did nothing its user should know why.
"""

from __future__ import annotations

from collections.abc import Iterator

from gt_passes import PassManagerReport


def explain_refusals(report: PassManagerReport) -> Iterator[str]:
    """One line for each pass and reason: how many places, and the first of them."""
    for record in report.records:
        if record.only_cleans_up:
            continue
        places: dict[str, list[str]] = {}
        for refusal in record.report.refusals:
            places.setdefault(refusal.reason, []).append(refusal.node_name)
        for reason, names in places.items():
            where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            yield f"{record.name} left {where} alone: {reason}"
