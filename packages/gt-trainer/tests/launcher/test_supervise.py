"""Supervision of forked ranks, with real processes and real signals; no torch is loaded.

Each test runs a small launching program as a child of its own, so that signals and exit statuses
are the operating system's. Its ranks note their process ids, and every test ends by asserting that
none of them is alive.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gt_trainer.launcher.supervise import RankPlan, run_ranks

FOLDER = Path(sys.argv[1])

def note_pid(name, pid):
    (FOLDER / f"{name}.pid.part").write_text(str(pid))
    (FOLDER / f"{name}.pid.part").rename(FOLDER / f"{name}.pid")

def wait_for(pattern, count):
    while len(list(FOLDER.glob(pattern))) < count:
        time.sleep(0.01)

def rank_with_a_child():
    global RANK
    RANK = int(os.environ["RANK"])
    child = subprocess.Popen(["sleep", "600"])
    note_pid(f"child{RANK}", child.pid)
    note_pid(f"rank{RANK}", os.getpid())
    wait_for("rank*.pid", 3)

def plan(**changes):
    return RankPlan(**{
        "num_ranks": 3,
        "environment": lambda rank: {"RANK": str(rank)},
        "log_folder": FOLDER,
        "grace_seconds": 2.0,
        **changes,
    })

def finish(outcome):
    assert "torch" not in sys.modules
    sys.stderr.write((outcome.message or "no message") + "\\n")
    sys.exit(outcome.status)
"""

SLEEPING = """
def run():
    rank_with_a_child()
    (FOLDER / f"ready{RANK}").touch()
    time.sleep(600)
finish(run_ranks(run, plan=plan()))
"""


def start(folder: Path, program: str) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As from a shell: a group of its own, which the terminal's Ctrl-C would reach.
        start_new_session=True,
        # Whoever runs the tests under nohup ignores SIGHUP, and so would the program.
        preexec_fn=hear_hangups,
    )


def hear_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def wait_until_ranks_sleep(folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("ready*"))) == 3, "all ranks are ready")


def noted_pids(folder: Path, *, count: int = 6) -> list[int]:
    files = list(folder.glob("*.pid"))
    assert len(files) == count
    return [int(file.read_text()) for file in files]


def assert_no_survivors(folder: Path, *, count: int = 6) -> None:
    # The kernel ends orphans in its own time, which is long on a busy machine.
    pids = noted_pids(folder, count=count)
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_ranks_that_finish_give_status_0_and_no_message(tmp_path):
    status, output, errors = finish(
        start(
            tmp_path,
            """
            def run():
                rank_with_a_child()
                print("hello from", RANK)
            finish(run_ranks(run, plan=plan()))
            """,
        )
    )
    assert (status, output, errors) == (0, "hello from 0\n", "no message\n")
    assert (tmp_path / "rank_1.log").read_text() == "hello from 1\n"
    assert (tmp_path / "rank_2.log").read_text() == "hello from 2\n"
    assert not (tmp_path / "rank_0.log").exists()
    assert_no_survivors(tmp_path)  # not even of what the ranks left running


def test_shown_ranks_can_be_chosen(tmp_path):
    status, output, _ = finish(
        start(
            tmp_path,
            """
            def run():
                print("hello from", os.environ["RANK"])
            finish(run_ranks(run, plan=plan(shown_ranks=frozenset({2}))))
            """,
        )
    )
    assert (status, output) == (0, "hello from 2\n")
    assert (tmp_path / "rank_0.log").read_text() == "hello from 0\n"


def test_a_rank_that_raises_ends_the_others_and_is_shown_once(tmp_path):
    status, output, errors = finish(
        start(
            tmp_path,
            """
            def fail():
                raise ValueError("no such thing\\nin two lines")
            def run():
                rank_with_a_child()
                if RANK == 1:
                    fail()
                time.sleep(600)
            finish(run_ranks(run, plan=plan()))
            """,
        )
    )
    assert (status, output) == (1, "")
    lines = errors.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert errors.count("Traceback") == 1
    assert "in fail" in errors
    assert "rank_process.py" not in errors
    assert lines[-5:] == [
        "ValueError: no such thing",
        "in two lines",
        "gt-train: rank 1 of 3 failed: ValueError: no such thing",
        "  the other ranks were ended",
        f"  its output: {tmp_path / 'rank_1.log'}",
    ]
    assert_no_survivors(tmp_path)


def test_the_cause_is_shown_and_not_the_ranks_that_lost_their_peer_first(tmp_path):
    status, _, errors = finish(
        start(
            tmp_path,
            """
            def run():
                rank_with_a_child()
                if RANK == 1:
                    try:
                        raise ValueError("the cause")
                    finally:
                        (FOLDER / "raised").touch()
                        time.sleep(0.3)  # closing files, say
                wait_for("raised", 1)
                raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242")
            finish(run_ranks(run, plan=plan()))
            """,
        )
    )
    assert status == 1
    assert "rank 1 of 3 failed: ValueError: the cause" in errors
    assert "Connection closed" not in errors
    assert_no_survivors(tmp_path)


def test_a_killed_rank_ends_the_others_and_gives_128_plus_its_signal(tmp_path):
    program = start(
        tmp_path,
        """
        def run():
            rank_with_a_child()
            if RANK == 2:
                print("about to die")
            (FOLDER / f"ready{RANK}").touch()
            time.sleep(600)
        finish(run_ranks(run, plan=plan()))
        """,
    )
    wait_until_ranks_sleep(tmp_path)
    os.kill(int((tmp_path / "rank2.pid").read_text()), signal.SIGKILL)
    status, output, errors = finish(program)
    assert (status, output) == (128 + 9, "")
    assert errors == (
        "about to die\n"
        "gt-train: rank 2 of 3 was killed by SIGKILL (the kernel does this when memory runs out)\n"
        "  the other ranks were ended\n"
        f"  its output: {tmp_path / 'rank_2.log'}\n"
    )
    assert_no_survivors(tmp_path)


def test_a_rank_that_exits_without_an_exception_is_a_failure(tmp_path):
    status, _, errors = finish(
        start(
            tmp_path,
            """
            def run():
                rank_with_a_child()
                if RANK == 0:
                    os._exit(3)
                time.sleep(600)
            finish(run_ranks(run, plan=plan()))
            """,
        )
    )
    assert status == 1
    assert errors == (
        "gt-train: rank 0 of 3 ended with status 3 and no exception\n  the other ranks were ended\n"
    )
    assert_no_survivors(tmp_path)


def test_a_crash_in_native_code_shows_the_python_stack(tmp_path):
    status, _, errors = finish(
        start(
            tmp_path,
            """
            import faulthandler
            def crash():
                faulthandler._sigsegv()
            def run():
                rank_with_a_child()
                if RANK == 1:
                    crash()
                time.sleep(600)
            finish(run_ranks(run, plan=plan()))
            """,
        )
    )
    assert status == 128 + signal.SIGSEGV
    assert "in crash" in errors
    assert "rank 1 of 3 was killed by SIGSEGV\n" in errors
    assert_no_survivors(tmp_path)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGINT, "gt-train: interrupted; all 3 ranks were ended\n"),
        (signal.SIGTERM, "gt-train: ended by SIGTERM; all 3 ranks were ended\n"),
        (signal.SIGHUP, "gt-train: ended by SIGHUP; all 3 ranks were ended\n"),
        (signal.SIGQUIT, "gt-train: ended by SIGQUIT; all 3 ranks were ended\n"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_to_the_launchers_group_ends_all_ranks_with_one_message(tmp_path, number, message):
    program = start(tmp_path, SLEEPING)
    wait_until_ranks_sleep(tmp_path)
    os.killpg(program.pid, number)  # as a terminal does
    status, output, errors = finish(program)
    assert (status, output, errors) == (128 + number, "", message)
    assert (tmp_path / "rank_1.log").read_text() == ""
    assert_no_survivors(tmp_path)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path):
    program = start(
        tmp_path,
        """
        def run():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            rank_with_a_child()
            (FOLDER / f"ready{RANK}").touch()
            time.sleep(600)
        finish(run_ranks(run, plan=plan(grace_seconds=0.2)))
        """,
    )
    wait_until_ranks_sleep(tmp_path)
    program.send_signal(signal.SIGINT)
    assert finish(program)[0] == 130
    assert_no_survivors(tmp_path)


def test_a_second_ctrl_c_does_not_wait_for_the_grace_time(tmp_path):
    program = start(
        tmp_path,
        """
        def note(number, frame):
            (FOLDER / f"asked{RANK}").touch()
        def run():
            signal.signal(signal.SIGTERM, note)
            rank_with_a_child()
            (FOLDER / f"ready{RANK}").touch()
            while True:
                time.sleep(600)
        finish(run_ranks(run, plan=plan(grace_seconds=500)))
        """,
    )
    wait_until_ranks_sleep(tmp_path)
    program.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("asked*"))) == 3, "all ranks were asked to end")
    program.send_signal(signal.SIGINT)
    assert finish(program)[0] == 130
    assert_no_survivors(tmp_path)


def test_the_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    program = start(tmp_path, SLEEPING)
    wait_until_ranks_sleep(tmp_path)
    program.kill()
    # Their children hold the pipes of the output; nobody is left to end those.
    program.wait()
    ranks = [int((tmp_path / f"rank{rank}.pid").read_text()) for rank in range(3)]
    wait_until(lambda: not any(is_alive(pid) for pid in ranks), "the ranks are dead")
    for rank in range(3):
        os.kill(int((tmp_path / f"child{rank}.pid").read_text()), signal.SIGKILL)
    program.communicate()


def test_the_ranks_die_with_a_killed_launcher_where_the_kernel_does_not_help(tmp_path):
    program = start(
        tmp_path,
        "from gt_trainer.launcher import rank_process\n"
        "rank_process._set_parent_death_signal = lambda: False\n"
        "rank_process._PARENT_POLL_SECONDS = 0.05\n" + SLEEPING,
    )
    wait_until_ranks_sleep(tmp_path)
    program.kill()
    program.communicate()
    # This way the whole group dies.
    wait_until(lambda: not any(map(is_alive, noted_pids(tmp_path))), "all are dead")


def test_ctrl_z_stops_the_ranks_and_they_continue(tmp_path):
    program = start(tmp_path, SLEEPING)
    wait_until_ranks_sleep(tmp_path)
    pids = noted_pids(tmp_path)

    def states():
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    program.send_signal(signal.SIGTSTP)
    wait_until(lambda: states() == {"T"}, "all are stopped")
    os.waitid(os.P_PID, program.pid, os.WSTOPPED)
    program.send_signal(signal.SIGCONT)
    wait_until(lambda: states() == {"S"}, "all continue")
    program.send_signal(signal.SIGINT)
    assert finish(program)[0] == 130
    assert_no_survivors(tmp_path)


def test_a_failure_while_hosting_leaves_no_rank_behind(tmp_path):
    status, _, errors = finish(
        start(
            tmp_path,
            """
            import contextlib
            @contextlib.contextmanager
            def host():
                wait_for("ready*", 3)
                raise OSError("cannot serve")
                yield
            def run():
                rank_with_a_child()
                (FOLDER / f"ready{RANK}").touch()
                time.sleep(600)
            run_ranks(run, plan=plan(), host=host)
            """,
        )
    )
    assert status == 1
    assert "cannot serve" in errors
    assert_no_survivors(tmp_path)


def test_a_process_with_another_thread_is_not_forked(tmp_path):
    status, _, errors = finish(
        start(
            tmp_path,
            """
            import threading
            threading.Thread(target=time.sleep, args=(600,), name="sleeper", daemon=True).start()
            run_ranks(lambda: None, plan=plan())
            """,
        )
    )
    assert status == 1
    assert errors.splitlines()[-1] == (
        "gt_trainer.launcher.fork_safety.ForkUnsafeError: --nproc cannot fork its ranks: this "
        "process has 1 thread besides the main one (sleeper), which a fork would break. Something "
        "imported or configured started it; use torchrun --nproc-per-node N -m gt_trainer ... "
        "instead, which starts each rank afresh"
    )


def test_a_thread_that_is_ending_is_waited_for(tmp_path):
    status, _, errors = finish(
        start(
            tmp_path,
            """
            import threading
            threading.Thread(target=time.sleep, args=(0.3,)).start()
            run_ranks(lambda: None, plan=plan())
            """,
        )
    )
    assert (status, errors) == (0, "")


def test_a_stopped_rank_is_named_when_another_one_gives_up_waiting(tmp_path):
    process = start(
        tmp_path,
        """
        def run():
            rank_with_a_child()
            if RANK == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)
            raise TimeoutError("no answer from rank 2")
        finish(run_ranks(run, plan=plan()))
        """,
    )
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "failed: TimeoutError: no answer from rank 2\n" in message
    assert (
        "  rank 2 was stopped by a signal (SIGSTOP, say), and did not answer the others: start "
        "again, and let no signal stop a process of the run\n"
    ) in message
