"""What must hold before ``--nproc`` forks, and how it is brought about and checked.

Importing torchtitan costs four CPU seconds, or ten without bytecode, so the parent imports once and
its ranks are forks of it. A fork copies only the calling thread: a lock that another thread held,
or an OpenMP pool, is broken in the child. So the parent must have exactly one thread and must not
have touched CUDA. ``prepare_environment`` keeps the libraries that torchtitan imports from starting
threads of their own accord; ``check_can_fork`` verifies, and refuses rather than hopes.

- OpenMP (torch) and OpenBLAS (numpy) size their pools from OMP_NUM_THREADS and
  OPENBLAS_NUM_THREADS; OpenBLAS starts its pool when numpy is imported.
- pyarrow, which torchtitan imports for its data sets, carries a jemalloc that starts a background
  thread unless JE_ARROW_MALLOC_CONF says otherwise.
- ``torch.cuda.is_available`` initialises the CUDA driver, after which no fork can use it, unless
  PYTORCH_NVML_BASED_CUDA_CHECK=1 (torch's own note on poisoned forks).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path

_TASKS = Path("/proc/self/task")
_ARROW_CONFIGURATION = "JE_ARROW_MALLOC_CONF"
_SECONDS_TO_END = 2.0
"""A thread that was joined, that of an earlier start's store, stays in the kernel's table until the
machine has run it for the last time."""


class ForkUnsafeError(RuntimeError):
    """This process has threads, or has initialised CUDA, and so must not be forked."""


def prepare_environment(environment: MutableMapping[str, str], *, num_ranks: int) -> int | None:
    """Set the variables that keep imports from starting threads or initialising CUDA.

    Call it before torch is imported. Values that the user has set stay, except that pyarrow's
    allocator is told, in addition, to have no background thread.

    Args:
        environment: The process's environment; changed in place.
        num_ranks: Number of processes that will be forked.

    Returns:
        How many OpenMP threads each rank should use, the machine's CPUs shared out; None if the
        user chose with OMP_NUM_THREADS.
    """
    threads = None if "OMP_NUM_THREADS" in environment else max(1, _num_cpus() // num_ranks)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    arrow = [environment[_ARROW_CONFIGURATION]] if environment.get(_ARROW_CONFIGURATION) else []
    environment[_ARROW_CONFIGURATION] = ",".join([*arrow, "background_thread:false"])
    return threads


def thread_names() -> list[str]:
    """Return a name for each thread of this process, the main thread first.

    On Linux these are all threads of the kernel's table, native ones too. Elsewhere they are the
    threads that Python knows.
    """
    main_id = os.getpid()
    python_names = {thread.native_id: thread.name for thread in threading.enumerate()}
    if not _TASKS.is_dir():
        return [name for _, name in sorted(python_names.items(), key=lambda item: item[0] or 0)]
    names = {}
    for task in _TASKS.iterdir():
        try:
            native_name = (task / "comm").read_text().strip()
        except OSError:  # it ended while we looked
            continue
        names[int(task.name)] = python_names.get(int(task.name), native_name)
    return [names[key] for key in sorted(names, key=lambda key: (key != main_id, key))]


def check_can_fork() -> None:
    """Refuse to fork a process with more than one thread, or one that has initialised CUDA.

    Threads that are ending are given a moment to do so.

    Raises:
        ForkUnsafeError: It names the threads, or the use of CUDA, and another way to start.
    """
    problems: list[str] = []
    deadline = time.monotonic() + _SECONDS_TO_END
    while (extra := thread_names()[1:]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if extra:
        problems.append(
            f"{len(extra)} thread{'' if len(extra) == 1 else 's'} besides the main one "
            f"({', '.join(extra)})"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        problems.append("an initialised CUDA context")
    if torch is not None and torch.distributed.is_initialized():
        problems.append("a process group")
    if problems:
        raise ForkUnsafeError(
            f"--nproc cannot fork its ranks: this process has {' and '.join(problems)}, which a "
            "fork would break. Something imported or configured started it; use torchrun "
            "--nproc-per-node N -m gt_trainer ... instead, which starts each rank afresh"
        )


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
