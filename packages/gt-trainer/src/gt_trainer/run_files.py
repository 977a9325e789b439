"""Names of what a run leaves in its dump folder beside metrics and checkpoints.

Here, and not where they are written, so that a report is made without torch.
"""

STARTUP_FILE = "startup.json"
"""Seconds before the first update, by part; of the newest start."""

STARTS_FILE = "starts.jsonl"
"""One object a start: the step that it began with, when, and what was trained on how many ranks."""

CAPTURES_FILE = "captures.json"
"""What rank 0 captured since its newest start, and what passes did to it."""

REPORT_FILE = "report.html"
"""The page that ``gt-train report`` makes of all of them."""
