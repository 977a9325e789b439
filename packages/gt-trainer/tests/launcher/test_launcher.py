"""``launch`` with torch: the rendezvous of forked ranks, and one rank in this process."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gt_trainer.launcher import (
    Rendezvous,
    Restarts,
    RunStoppedError,
    launch,
    prepare_environment,
)
from gt_trainer.launcher.fork_safety import thread_names

RENDEZVOUS_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture
def clean_environment(monkeypatch):
    for name in (*RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS"):
        # setenv first, so that monkeypatch removes what `launch` sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def run_program(program: str, *arguments: object, **variables: str):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (*RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS")
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**environment, **variables},
    )


def test_forked_ranks_meet_after_the_parent_imported_torchtitan_without_starting_a_thread(tmp_path):
    finished = run_program(
        """
        import os, sys
        from pathlib import Path
        from gt_trainer.launcher import launch, prepare_environment
        from gt_trainer.launcher.fork_safety import thread_names

        num_threads = prepare_environment(os.environ, num_ranks=4)
        from gt_trainer.device import install
        install("cpu")
        import torch
        import torchtitan.trainer
        from torchtitan.config import CommConfig
        from torchtitan.distributed.utils import init_distributed

        assert len(thread_names()) == 1, thread_names()
        assert not torch.cuda.is_initialized()

        def run():
            assert init_distributed(CommConfig(trace_buf_size=0)) == 4
            assert torch.get_num_threads() == num_threads
            total = torch.tensor([2 ** int(os.environ["LOCAL_RANK"])])
            torch.distributed.all_reduce(total)
            print("sum", total.item())
            torch.distributed.destroy_process_group()

        sys.exit(launch(run, num_ranks=4, log_folder=Path(sys.argv[1]), num_threads=num_threads))
        """,
        tmp_path / "logs",
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == "sum 15\n"
    for rank in (1, 2, 3):
        assert (tmp_path / "logs" / f"rank_{rank}.log").read_text() == "sum 15\n"


def test_a_rank_that_fails_inside_a_collective_is_reported_alone(tmp_path):
    finished = run_program(
        """
        import os, sys
        from pathlib import Path
        from gt_trainer.launcher import launch, prepare_environment
        prepare_environment(os.environ, num_ranks=3)
        import torch.distributed

        def run():
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()
            if os.environ["RANK"] == "2":
                raise ValueError("the cause")
            torch.distributed.all_reduce(torch.ones(3))

        sys.exit(launch(run, num_ranks=3, log_folder=Path(sys.argv[1])))
        """,
        tmp_path,
    )
    assert finished.returncode == 1
    assert finished.stderr.count("Traceback") == 1
    assert finished.stderr.splitlines()[-4:] == [
        "ValueError: the cause",
        "gt-train: rank 2 of 3 failed: ValueError: the cause",
        "  the other ranks were ended",
        f"  its output: {tmp_path / 'rank_2.log'}",
    ]


def test_one_rank_runs_in_this_process_as_rank_0_of_1(tmp_path, clean_environment):
    seen = {}

    def run():
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        seen["world_size"] = torch.distributed.get_world_size()
        torch.distributed.destroy_process_group()
        seen["pid"] = os.getpid()
        seen["variables"] = {name: os.environ[name] for name in RENDEZVOUS_VARIABLES}
        assert int(seen["variables"].pop("MASTER_PORT")) > 0

    assert launch(run, num_ranks=1, log_folder=tmp_path / "logs") == 0
    assert seen == {
        "world_size": 1,
        "pid": os.getpid(),
        "variables": {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        },
    }
    assert not (tmp_path / "logs").exists()


def test_a_failure_in_this_process_is_shown_once(tmp_path, clean_environment, capsys):
    def run():
        raise ValueError("no such thing")

    assert launch(run, num_ranks=1, log_folder=tmp_path) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "ValueError: no such thing",
        "gt-train: failed: ValueError: no such thing",
    ]
    assert "launch.py" not in shown.err


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("SIGINT", 130, "gt-train: interrupted\n"),
        ("SIGTERM", 143, "gt-train: ended by SIGTERM\n"),
        ("SIGQUIT", 131, "gt-train: ended by SIGQUIT\n"),
        ("SIGHUP", 129, "gt-train: ended by SIGHUP\n"),
    ],
)
def test_a_signal_ends_a_run_in_this_process_with_one_message(tmp_path, name, status, message):
    finished = run_program(
        """
        import os, signal, sys, time
        from pathlib import Path
        from gt_trainer.launcher import launch

        def run():
            try:
                os.kill(os.getpid(), signal.Signals[sys.argv[2]])
                time.sleep(600)
            finally:
                print("closed")

        sys.exit(launch(run, num_ranks=1, log_folder=Path(sys.argv[1]), communicates=False))
        """,
        tmp_path,
        name,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (status, "closed\n", message)


def test_a_second_ctrl_c_ends_a_run_that_swallowed_the_first(tmp_path):
    finished = run_program(
        """
        import io, os, signal, sys, time
        from pathlib import Path
        from gt_trainer.launcher import launch

        def run():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                print("swallowed", flush=True)

            class Interrupted(io.RawIOBase):  # while a message is being written
                def writable(self):
                    return True

                def write(self, text):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(600)

            sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
            print("x" * 100_000, file=sys.stderr, flush=True)

        sys.exit(launch(run, num_ranks=1, log_folder=Path(sys.argv[1]), communicates=False))
        """,
        tmp_path,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (
        130,
        "swallowed\n",
        "gt-train: interrupted\n",
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_stops_a_run_with_a_reason_is_shown_without_a_traceback(tmp_path, num_ranks):
    finished = run_program(
        """
        import sys
        from pathlib import Path
        from gt_trainer.launcher import RunStoppedError, launch

        def run():
            raise RunStoppedError("the disk is full\\n  free some")

        sys.exit(launch(run, num_ranks=int(sys.argv[2]), log_folder=Path(sys.argv[1])))
        """,
        tmp_path,
        num_ranks,
    )
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "the disk is full\n  free some\n" in finished.stderr


_RESTARTED = """
import os, signal, sys
from pathlib import Path
from gt_trainer.launcher import Restarts, RunStoppedError, launch, prepare_environment

prepare_environment(os.environ, num_ranks=2)
import torch.distributed as dist

folder, how, at_most = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def run():
    dist.init_process_group("gloo")
    starts = len(list(folder.glob("start-*")))
    if dist.get_rank() == 1 and starts < 2:
        if how in ("killed", "finished", "unready"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise ValueError("a passing weakness")
        raise RunStoppedError("nothing that another start would mend")
    dist.barrier()
    os.write(1, f"rank {dist.get_rank()} after {starts} starts again\\n".encode())
    dist.destroy_process_group()

def prepare():
    (folder / f"start-{len(list(folder.glob('start-*')))}").touch()
    if how == "unready":
        raise RunStoppedError("the folder is another run's")
    return how != "finished"

restarts = Restarts(at_most=at_most, prepare=prepare)
sys.exit(launch(run, num_ranks=2, log_folder=folder, shown_ranks=(0, 1), restarts=restarts))
"""


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_ranks_start_again_after_one_of_them_died(tmp_path, how):
    finished = run_program(_RESTARTED, tmp_path, how, 2)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == [
        "rank 0 after 2 starts again",
        "rank 1 after 2 starts again",
    ]
    again = [line for line in finished.stderr.splitlines() if "again" in line]
    assert again == [
        "gt-train: starting again, 1 of --restarts 2",
        "gt-train: starting again, 2 of --restarts 2",
    ]


def test_ranks_start_again_no_more_often_than_was_asked(tmp_path):
    finished = run_program(_RESTARTED, tmp_path, "killed", 1)
    assert finished.returncode == 128 + signal.SIGKILL
    assert finished.stderr.count("starting again") == 1
    assert finished.stdout == ""


def test_ranks_that_stop_with_a_reason_do_not_start_again(tmp_path):
    finished = run_program(_RESTARTED, tmp_path, "stopped", 2)
    assert finished.returncode == 1
    assert "nothing that another start would mend" in finished.stderr
    assert "again" not in finished.stderr


@pytest.mark.parametrize(
    ("how", "said"),
    [("finished", ""), ("unready", "gt-train: not started again: the folder is another run's")],
)
def test_ranks_do_not_start_again_where_nothing_is_left_or_cannot_be(tmp_path, how, said):
    finished = run_program(_RESTARTED, tmp_path, how, 2)
    assert finished.returncode == 128 + signal.SIGKILL
    assert "starting again" not in finished.stderr
    assert said in finished.stderr


def test_one_rank_in_this_process_cannot_start_again(tmp_path):
    restarts = Restarts(at_most=1, prepare=lambda: True)
    with pytest.raises(ValueError, match="restarts are of forked ranks, and num_ranks is 1"):
        launch(lambda: None, num_ranks=1, log_folder=tmp_path, restarts=restarts)


def test_a_rank_of_a_given_job_runs_in_this_process(tmp_path, clean_environment, capsys):
    rendezvous = Rendezvous(
        rank=3,
        world_size=8,
        local_rank=1,
        local_world_size=None,
        master_addr="node1",
        master_port=29500,
        source="Slurm",
    )

    def run():
        assert os.environ["RANK"] == "3"
        assert os.environ["MASTER_ADDR"] == "node1"
        raise ValueError("no such thing")

    assert launch(run, num_ranks=1, log_folder=tmp_path, rendezvous=rendezvous) == 1
    assert capsys.readouterr().err.endswith(
        "gt-train: rank 3 of 8: failed: ValueError: no such thing\n"
    )
    with pytest.raises(ValueError, match="already rank 3 of 8 of a job started by Slurm"):
        launch(run, num_ranks=2, log_folder=tmp_path, rendezvous=rendezvous)


@pytest.mark.parametrize(
    ("local_rank", "told"), [(0, "the disk is full\n  free some\n"), (1, "the disk is full\n")]
)
def test_what_to_do_after_a_stop_is_told_once_a_machine(
    tmp_path, clean_environment, capsys, local_rank, told
):
    rendezvous = Rendezvous(
        rank=2 + local_rank,
        world_size=4,
        local_rank=local_rank,
        local_world_size=2,
        master_addr="node1",
        master_port=29500,
        source="torchrun",
    )

    def run():
        raise RunStoppedError("the disk is full\n  free some")

    assert launch(run, num_ranks=1, log_folder=tmp_path, rendezvous=rendezvous) == 1
    assert capsys.readouterr().err == f"gt-train: rank {2 + local_rank} of 4: {told}"


def test_a_handler_from_outside_python_stays(tmp_path, clean_environment, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    assert launch(lambda: None, num_ranks=1, log_folder=tmp_path) == 0


def test_no_rank_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_ranks is 0, and must be at least 1"):
        launch(lambda: None, num_ranks=0, log_folder=tmp_path)


def test_the_environment_is_prepared_without_overriding_the_user():
    environment: dict[str, str] = {}
    assert prepare_environment(environment, num_ranks=10_000) == 1
    assert environment == {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    chosen = {"OMP_NUM_THREADS": "6", "JE_ARROW_MALLOC_CONF": "narenas:2"}
    assert prepare_environment(chosen, num_ranks=2) is None
    assert chosen["OMP_NUM_THREADS"] == "6"
    assert chosen["JE_ARROW_MALLOC_CONF"] == "narenas:2,background_thread:false"


def test_threads_are_named_main_first():
    import threading

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="second")
    thread.start()
    try:
        names = thread_names()
    finally:
        stop.set()
        thread.join()
    assert names[0] == "MainThread"
    assert "second" in names


LISTENING = """
    def listening():
        own = {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{each}")}
        lines = [line.split() for name in ("tcp", "tcp6")
                 for line in open(f"/proc/self/net/{name}").read().splitlines()[1:]]
        return {c[1].split(":")[0] for c in lines if c[3] == "0A" and f"socket:[{c[9]}]" in own}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "source",
    ["gt-train", *(pytest.param(each, marks=pytest.mark.slow) for each in ("torchrun", "Slurm"))],
)
def test_a_job_of_one_host_listens_on_loopback_alone(source: str, tmp_path: Path) -> None:
    program = f"""
    import os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from gt_trainer.launcher import find_rendezvous, launch
    {LISTENING}
    def run():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        print(sorted(listening()))
        dist.destroy_process_group()

    sys.exit(launch(run, num_ranks=1, log_folder=Path(sys.argv[1]),
                    rendezvous=find_rendezvous(os.environ)))
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {
        "gt-train": {},
        "torchrun": {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        },
        "Slurm": {
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "gpu1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        },
    }[source]
    ranks = [environment]
    if source == "Slurm":
        ranks = [{**environment, "MASTER_PORT": port}]
        ranks.append({**ranks[0], "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
            env={**os.environ, **each},
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in ranks
    ]
    for each in running:
        assert each.communicate(timeout=100)[0] == "['0100007F']\n"
        assert each.returncode == 0
