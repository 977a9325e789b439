"""Shared by ``bench_passes`` and ``bench_collectives``: a captured graph, and the peer's passes."""
