"""What the tests of the rules ask, and of which configurations."""

import dataclasses

from gt_config import CompileConfig, EpOverlapConfig, Topology, find_violations

TOPOLOGY = Topology(world=1, batch_size=4, seq_len=8)
EP_TOPOLOGY = Topology(world=4, dp_shard=4, ep=2, batch_size=4, seq_len=8)
KNOWN = ("canonicalize-views", "remove-dead-code", "one-all-gather-chain")


def found(config=None, topology=TOPOLOGY, known_passes=KNOWN):
    return find_violations(config or CompileConfig(), topology, known_passes=known_passes)


def only(config=None, topology=TOPOLOGY, known_passes=KNOWN):
    [violation] = found(config, topology, known_passes)
    return violation


NUM_CHUNKS = "--compile.ep_overlap.num_chunks"


def mesh(**changes):
    return dataclasses.replace(TOPOLOGY, **changes)


def overlap(**settings):
    return CompileConfig(ep_overlap=EpOverlapConfig(enabled=True, **settings))
