"""Workers and the fake world: results come back, failures say where, nothing stays behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from worker_cases import (
    exit_on,
    fail_on,
    is_imported,
    sleep_on,
    sum_of_ranks,
    system_exit,
    threads,
    unpicklable,
)

from gt_trace.testing import GlooWorkers, WorkerError, fake_world


@pytest.fixture(scope="module")
def workers() -> Iterator[GlooWorkers]:
    # Each test that fails ends its workers; the next call starts new ones.
    with GlooWorkers(2) as started:
        yield started


def pids(workers: GlooWorkers) -> list[int]:
    return [pid for _, pid, _ in workers.run(sum_of_ranks, 1)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(found: list[int]) -> None:
    """The parent of a worker is the fork server, which reaps it a moment after its end."""
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in found):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_returns_what_each_rank_returned_by_rank(workers: GlooWorkers) -> None:
    results = workers.run(sum_of_ranks, 10)
    assert [(rank, total) for rank, _, total in results] == [(0, 10), (1, 10)]


def test_a_later_pool_has_its_own_modules(workers: GlooWorkers) -> None:
    assert workers.run(is_imported, "wave") == [False, False]
    with GlooWorkers(1, preload=["wave"]) as later:
        assert later.run(is_imported, "wave") == [True]


def test_workers_are_reused_across_calls(workers: GlooWorkers) -> None:
    first = pids(workers)
    assert len(set(first)) == 2
    assert os.getpid() not in first
    assert pids(workers) == first


def test_workers_compute_on_one_thread_over_gloo(workers: GlooWorkers) -> None:
    assert workers.run(threads) == [(1, True)] * 2


def test_failure_names_the_rank_and_shows_its_traceback(workers: GlooWorkers) -> None:
    before = pids(workers)
    with pytest.raises(WorkerError) as error:
        workers.run(fail_on, 1)
    text = str(error.value)
    assert text.startswith("rank 1 failed:\nTraceback (most recent call last):\n")
    assert "in fail_on" in text
    assert text.endswith("LookupError: what this rank missed\n")
    # The rank that waited in the barrier is gone too, and new workers answer the next call.
    assert_gone(before)
    after = pids(workers)
    assert not set(after) & set(before)


def test_a_rank_that_dies_is_named_with_its_exit_code(workers: GlooWorkers) -> None:
    before = pids(workers)
    with pytest.raises(WorkerError) as error:
        workers.run(exit_on, 1, 7)
    assert str(error.value) == "rank 1 died with exit code 7"
    assert_gone(before)


def test_a_rank_that_died_between_calls_is_noticed(workers: GlooWorkers) -> None:
    before = pids(workers)
    workers._processes[0].kill()
    workers._processes[0].join()
    with pytest.raises(WorkerError) as error:
        workers.run(threads)
    assert str(error.value) == "rank 0 died with exit code -9"
    assert_gone(before)


def test_a_call_to_exit_is_a_failure(workers: GlooWorkers) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank \d failed:.*SystemExit: 0"):
        workers.run(system_exit)


def test_a_result_that_cannot_be_pickled_is_a_failure(workers: GlooWorkers) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank \d failed:.*pickle"):
        workers.run(unpicklable)


def test_a_function_that_cannot_be_imported_is_refused_before_any_worker_hears_of_it(
    workers: GlooWorkers,
) -> None:
    before = pids(workers)
    with pytest.raises(AttributeError):
        workers.run(lambda: None)
    assert pids(workers) == before


def test_too_long_a_call_names_the_ranks_that_did_not_answer() -> None:
    with GlooWorkers(2, timeout=60.0) as workers:
        before = pids(workers)
        workers._timeout = 0.5
        with pytest.raises(WorkerError) as error:
            workers.run(sleep_on, 1, 600.0)
        assert str(error.value) == "ranks [1] took more than 0.5 s"
        assert_gone(before)


def test_close_ends_the_workers_and_may_be_called_twice() -> None:
    workers = GlooWorkers(2)
    started = pids(workers)
    workers.close()
    workers.close()
    assert_gone(started)


def test_no_worker_starts_before_the_first_call() -> None:
    with GlooWorkers(2) as workers:
        assert workers._processes == []


def test_fake_world_is_one_rank_of_any_number() -> None:
    with fake_world(rank=5, world_size=4096):
        assert dist.get_rank() == 5
        assert dist.get_world_size() == 4096
        mesh = init_device_mesh("cpu", (64, 64), mesh_dim_names=("a", "b"))
        assert mesh.get_local_rank("b") == 5
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
    assert not dist.is_initialized()


def test_fake_world_ends_with_an_exception_and_another_may_follow() -> None:
    with pytest.raises(KeyError), fake_world(rank=0, world_size=2):
        raise KeyError
    assert not dist.is_initialized()
    with fake_world(rank=1, world_size=3):
        assert dist.get_world_size() == 3


def test_fake_worlds_do_not_nest() -> None:
    with (
        fake_world(rank=0, world_size=2),
        pytest.raises(ValueError, match="twice"),
        fake_world(rank=0, world_size=2),
    ):
        pass
    assert not dist.is_initialized()
