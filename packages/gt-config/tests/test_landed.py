"""Options whose part has not landed: data, and refused by name."""

import dataclasses

import pytest

from gt_config import CompileConfig, Topology, Violation, find_violations
from gt_config.landed import UNLANDED, UnlandedOption

TOPOLOGY = Topology(world=1, batch_size=2, seq_len=8)


def violations_of(config=None, topology=TOPOLOGY, **settings):
    found = find_violations(config or CompileConfig(**settings), topology, known_passes=())
    return {
        violation.flag: violation for violation in found if "in this version" in violation.allowed
    }


@pytest.mark.parametrize(
    ("axis", "flag", "reason"),
    [
        (
            "cp",
            "--parallelism.context_parallel_degree",
            "context parallelism is not supported yet",
        ),
    ],
)
def test_refuses_a_mesh_axis_that_has_not_landed(axis, flag, reason):
    topology = dataclasses.replace(TOPOLOGY, world=2, **{axis: 2})
    assert violations_of(topology=topology) == {
        flag: Violation(flag=flag, value=2, allowed="1 in this version", fix=f"use 1: {reason}")
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "none"},
        {"verify_passes": False},
        {"on_shape_change": "recapture"},
        {"capture_layers": "full"},
        {"capture_layers": "stamped"},
        {"capture_layers": "compared"},
        {"mode": "aot_joint"},
        {"inductor_compilation": "regional"},
        {"inductor_compilation": "full"},
        {"memory_policy": "selective"},
        {"memory_policy": "full_recompute"},
        {"memory_policy": "offload"},
        {"fsdp_bucketing": "off"},
        {"prefetch_layers": 0},
        {"debug_graph_passes": True},
        {"numerics_changing": True},
        {"cuda_graphs": True},
        {"autoparallel": True},
        {"autoparallel": True, "inductor_compilation": "autoparallel_backend"},
    ],
)
def test_accepts_what_has_landed(settings):
    assert find_violations(CompileConfig(**settings), TOPOLOGY, known_passes=()) == ()


def test_accepts_an_option_once_its_entry_is_gone():
    remaining = [option for option in UNLANDED if option.path != "topology.cp"]
    topology = dataclasses.replace(TOPOLOGY, world=2, cp=2)
    assert find_violations(CompileConfig(), topology, known_passes=(), unlanded=UNLANDED) != ()
    assert find_violations(CompileConfig(), topology, known_passes=(), unlanded=remaining) == ()


@pytest.mark.parametrize(
    "path", ["config.cuda_graph", "topology.ranks", "mesh.tp", "tp", "config.ep_overlap.chunks"]
)
def test_refuses_an_entry_for_a_field_that_does_not_exist(path):
    with pytest.raises(ValueError, match="is no field of the configuration or the topology"):
        UnlandedOption(path=path, refused=bool, landed="0", reason="later")
