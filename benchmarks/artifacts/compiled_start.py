"""One start of ``gt-train`` that compiles: ``python -m artifacts.compiled_start ARTIFACTS``.

One update of Llama 3's debug model, its whole graph by Inductor, on one rank and a CPU, with a
cache of Inductor's that nobody has used. ARTIFACTS is the folder of stored graphs; if it has one,
the start is warm. Prints one line of JSON: processor seconds with those of C++ compilers, and how
many of them are imports.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

_FLAGS = (
    *("--nproc", "1"),
    *("--module", "llama3"),
    *("--config", "llama3_debugmodel"),
    *("--training.steps", "1"),
    *("--training.seq_len", "128"),
    *("--training.local_batch_size", "2"),
    *("--compile.inductor_compilation", "full"),
    "--compile.numerics_changing",
    "--checkpoint.no-enable",
)


def main(artifacts: str) -> None:
    """Start once and print what it took."""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "gt_trainer", *_FLAGS),
                *("--compile.artifacts", artifacts),
                *("--dump_folder", f"{folder}/output"),
            ],
            env={
                **os.environ,
                "GT_DEVICE": "cpu",
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                # Workers would live on behind the run, and not be counted.
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise RuntimeError(f"gt-train failed:\n{ran.stdout[-4000:]}")
        startup = json.loads(Path(folder, "output", "startup.json").read_text())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = {
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "imports": startup["cpu_imports"],
        "is_loaded": "cpu_load" in startup,
    }
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
