"""Start a training run: as N forked local ranks, as a rank of a given job, or in this process.

::

    command                              what happens
    gt-train                             this process is rank 0 of 1
    gt-train --nproc 4                   this process imports, forks 4 ranks and supervises them
    torchrun ... -m gt_trainer           this process is the rank that torchrun says
    srun gt-train                        this process is the rank that Slurm says
"""

from gt_trainer.launcher.child import ChildFailedError, ChildTimedOutError, run_in_child
from gt_trainer.launcher.fork_safety import ForkUnsafeError, prepare_environment
from gt_trainer.launcher.launch import Restarts, launch
from gt_trainer.launcher.rendezvous import Rendezvous, RendezvousError, find_rendezvous
from gt_trainer.launcher.stop import RunStoppedError

__all__ = [
    "ChildFailedError",
    "ChildTimedOutError",
    "ForkUnsafeError",
    "Rendezvous",
    "RendezvousError",
    "Restarts",
    "RunStoppedError",
    "find_rendezvous",
    "launch",
    "prepare_environment",
    "run_in_child",
]
