"""Writers that are killed at random moments: a program that starts them, and looks at what is left.

It imports no torch: a process that did would take more memory to fork than its writers need, and
seconds to start. ``python killed_writers.py FOLDER '{"kills": 40, ...}'`` prints a report as JSON.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

DIGESTS = ("a" * 64, "b" * 64, "c" * 64)
NAMES = ("forward.gta", "backward.gta")


def report_of_killed_writers(
    folder: Path, *, kills: int, writers: int, max_bytes: int | None
) -> dict[str, Any]:
    """Run this program.

    Returns:
        ``interrupted``: kills that a temporary file outlived, aged by hours then; ``left``: the
        temporary files after one more write; ``problems``: what was wrong, and must be empty;
        ``entries``: how many there are; ``read``: how often an entry was read and found whole;
        ``evicted``: how often one was gone that was there before.
    """
    how = json.dumps({"kills": kills, "writers": writers, "max_bytes": max_bytes})
    command = [sys.executable, __file__, str(folder), how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _without_torch() -> None:
    """Let the modules of gt_trace.artifacts be imported, and what packages import be not."""
    found = importlib.util.find_spec("gt_trace")
    assert found is not None
    assert found.submodule_search_locations
    places = [Path(place) for place in found.submodule_search_locations]
    for name, here in (
        ("gt_trace", places),
        ("gt_trace.artifacts", [p / "artifacts" for p in places]),
    ):
        module = ModuleType(name)
        module.__path__ = [str(place) for place in here]
        sys.modules[name] = module


def _write_until_killed(folder: Any, begun: int) -> NoReturn:
    from container_cases import container_bytes

    generator = random.Random(os.urandom(8))
    try:
        while True:
            size = generator.choice((10, 10_000, 300_000))
            raw = container_bytes(
                {"graph": {"writer": os.getpid()}}, {"constants": generator.randbytes(size)}
            )
            parts = [raw[i : i + 2**14] for i in range(0, len(raw), 2**14)]

            def write(file: Any, parts: list[bytes] = parts) -> None:
                os.write(begun, b".")
                for part in parts:
                    file.write(part)

            folder.write(generator.choice(DIGESTS), generator.choice(NAMES), write)
    finally:  # never back into the copy of the program that was forked
        traceback.print_exc()
        os._exit(1)


def _temporary_files(path: Path, pattern: str) -> list[str]:
    # Not Path.glob, which fails where a folder is removed meanwhile.
    return glob.glob(f"{path}/*/.writing-{pattern}")


@dataclass(frozen=True, slots=True)
class _Writer:
    """A process that writes entry after entry."""

    pid: int
    begun: int
    """Gives a byte for each entry that it began to write, while the temporary file is open."""

    @classmethod
    def started(cls, folder: Any) -> _Writer:
        begun, says_begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            _write_until_killed(folder, says_begun)
        os.close(says_begun)
        return cls(pid, begun)

    def killed(self) -> int:
        """Kill it; returns the status with which it ended."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.begun)
        return os.waitpid(self.pid, 0)[1]


def _main(path: Path, *, kills: int, writers: int, max_bytes: int | None) -> dict[str, Any]:
    from container_cases import FINGERPRINT, KIND, container_bytes

    from gt_trace.artifacts.container import open_container
    from gt_trace.artifacts.folder import ArtifactFolder
    from gt_trace.errors import ArtifactError

    folder = ArtifactFolder(path, max_bytes=max_bytes)
    interrupted = read = evicted = 0
    problems = []
    begin = time.monotonic()
    for digest in DIGESTS:
        for name in NAMES:
            folder.write(digest, name, lambda file: file.write(container_bytes()) and None)
    known = {entry.path for entry in folder.entries()}
    longest = 3 * (time.monotonic() - begin) / len(known)
    running = [_Writer.started(folder) for _ in range(writers)]
    try:
        for _ in range(kills):
            victim = running.pop(random.randrange(writers))
            # Counted in its own writes: on a busy machine it may not have run for a while.
            for _ in range(random.randrange(4)):
                os.read(victim.begun, 1)
            time.sleep(random.uniform(0.0, longest))
            status = victim.killed()
            if not os.WIFSIGNALED(status):
                problems.append(f"a writer ended by itself, with status {status}")
            left = _temporary_files(path, f"*-{victim.pid}-*")
            interrupted += len(left)
            for temporary in left:
                os.utime(temporary, (0, 0))
            found = {entry.path for entry in folder.entries()}
            evicted += len(known - found)
            for entry in sorted(known | found):
                try:
                    with open_container(entry, kind=KIND, fingerprint=FINGERPRINT) as container:
                        container.verify()
                    read += 1
                except ArtifactError as error:
                    gone = isinstance(error.__cause__, FileNotFoundError)
                    if not gone or max_bytes is None:
                        problems.append(str(error))
            known = found
            running.append(_Writer.started(folder))
    finally:
        for writer in running:
            writer.killed()
    for temporary in _temporary_files(path, "*"):
        os.utime(temporary, (0, 0))
    folder.write(DIGESTS[0], NAMES[0], lambda file: file.write(container_bytes()) and None)
    return {
        "interrupted": interrupted,
        "left": _temporary_files(path, "*"),
        "problems": problems,
        "entries": len(folder.entries()),
        "read": read,
        "evicted": evicted,
        "torch": "torch" in sys.modules,
    }


if __name__ == "__main__":
    _without_torch()
    print(json.dumps(_main(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
