"""What ``bench_passes`` and ``bench_collectives`` share: one captured graph, our passes, the peer's."""
