"""Pages in the browser of this machine, if it has one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
"""None where none is installed."""


def complaints(page: Path) -> list[str]:
    """What the console says of a page, and every address that it asks for.

    The browser finds no other machine.
    """
    assert BROWSER is not None
    net_log = page.with_suffix(".net.json")
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}"),
        f"--log-net-log={net_log}",
    ]
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "</html>" in done.stdout
    # What the browser asks for by itself is of no site.
    asked = re.findall(r'\{site=file:[^"]*","url":"(http[^"]*)"', net_log.read_text())
    return [*re.findall(r":CONSOLE.*\] (.*)", done.stderr), *dict.fromkeys(asked)]
