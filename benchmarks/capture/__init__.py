"""Shared by ``bench_capture``: one capture in a process of its own, ours or the peer's."""
