"""The machine that is simulated: every constant of the cost model, each with its source.

The numbers stand in one data file beside this module (``h100_sxm.json``), each with where it comes
from and what kind of knowledge it is: a data-sheet value, a published measurement, a value from
published source code, or an assumption of ours. Code has no constants of its own. A file with
measurements of one's own machine is made by ``benchmarks/calibrate_simulation.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, get_args

from gt_passes.errors import GtPassesError

ConstantKind = Literal[
    "data sheet", "published measurement", "published source", "own measurement", "assumption"
]
ScalesWith = Literal["compute", "memory", "network", "latency", "nothing"]
"""The group of constants that a sensitivity analysis moves together."""


_MAY_BE_ZERO = frozenset({"collective_sms", "collective_sms_per_nic", "collective_memory_passes"})
_FORM = "JSON with name, fixed_on and constants, each an object, as h100_sxm.json has"


class HardwareDataError(GtPassesError, ValueError):
    """A hardware data file lacks a constant, has one too many, or a malformed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number of a hardware data file, and why it is believed."""

    value: float
    unit: str
    kind: ConstantKind
    scales_with: ScalesWith
    source: str
    """Publication, project and file, or the reasoning behind an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The constants of one kind of machine, as the models read them. Units stand in the names.

    What each means, and its source, is in ``constants`` under the same name.
    """

    name: str
    fixed_on: str
    """Date since which no value has changed."""

    constants: Mapping[str, Constant]
    """As loaded; ``scaled`` leaves them alone."""

    peak_bf16_flops_per_s: float
    peak_fp8_flops_per_s: float
    peak_tf32_flops_per_s: float
    peak_fp32_flops_per_s: float
    peak_fp64_flops_per_s: float
    num_sms: int
    matmul_efficiency: float
    matmul_fp8_efficiency: float
    tile_128x128_relative_speed: float
    tile_64x128_relative_speed: float
    matmul_min_split_k: int
    grouped_matmul_efficiency: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    attention_mask_density: float
    hbm_bytes_per_s: float
    hbm_capacity_bytes: int
    hbm_streaming_efficiency: float
    hbm_irregular_efficiency: float
    kernel_fixed_us: float
    pcie_bytes_per_s: float
    pcie_efficiency: float
    host_kernel_us: float
    host_view_us: float
    host_collective_us: float
    host_wait_us: float
    host_scalar_us: float
    host_sync_us: float
    launch_latency_us: float
    graph_replay_kernel_us: float
    gpus_per_node: int
    nvlink_bytes_per_s: float
    nvlink_bus_bytes_per_s: float
    nvls_all_reduce_bus_bytes_per_s: float
    nvls_min_ranks: int
    nic_bytes_per_s: float
    nic_effective_bytes_per_s: float
    all_to_all_peer_us: float
    nccl_channels: int
    collective_sms: int
    collective_sms_per_nic: int
    collective_memory_passes: float
    nccl_ring_base_ll_us: float
    nccl_ring_base_ll128_us: float
    nccl_ring_base_simple_us: float
    nccl_tree_base_ll_us: float
    nccl_tree_base_ll128_us: float
    nccl_tree_base_simple_us: float
    nccl_ring_nvlink_ll_us: float
    nccl_ring_nvlink_ll128_us: float
    nccl_ring_nvlink_simple_us: float
    nccl_tree_nvlink_ll_us: float
    nccl_tree_nvlink_ll128_us: float
    nccl_tree_nvlink_simple_us: float
    nccl_ring_network_ll_us: float
    nccl_ring_network_ll128_us: float
    nccl_ring_network_simple_us: float
    nccl_tree_network_ll_us: float
    nccl_tree_network_ll128_us: float
    nccl_tree_network_simple_us: float
    nccl_nvls_simple_us: float
    nccl_ll_1_node_bytes_per_s: float
    nccl_ll_2_nodes_bytes_per_s: float
    nccl_ll_4_nodes_bytes_per_s: float
    nccl_ll128_channel_bytes_per_s: float

    def scaled(self, group: ScalesWith, factor: float) -> Hardware:
        """The same machine with one group of constants ``factor`` times as fast.

        Rates are multiplied, latencies divided; efficiencies and counts stay.

        Args:
            group: "compute", "memory", "network" or "latency".
            factor: above 1 is a faster machine.

        Raises:
            ValueError: the factor is not above 0.
        """
        if factor <= 0:
            raise ValueError(f"factor is {factor!r}; allowed: a number above 0")
        changed: dict[str, Any] = {}
        for name, constant in self.constants.items():
            if constant.scales_with != group:
                continue
            if name.endswith("_us"):
                changed[name] = getattr(self, name) / factor
            elif name.endswith("_per_s"):
                changed[name] = getattr(self, name) * factor
        return replace(self, **changed)


@cache
def h100_sxm() -> Hardware:
    """NVIDIA H100 SXM, 8 to a node, one 400 Gb/s NIC to each GPU: ``h100_sxm.json``."""
    return shipped_hardware("h100_sxm.json")


@cache
def h100_hbm2e_500w() -> Hardware:
    """The same with HBM2e of 2.4 TB/s and a limit of 500 W: ``h100_hbm2e_500w.json``."""
    return shipped_hardware("h100_hbm2e_500w.json")


@cache
def shipped_hardware(name: str) -> Hardware:
    """The machine of a data file that is shipped here.

    Args:
        name: of the file: ``h100_sxm.json``, ``h100_hbm2e_500w.json``, ``h200.json``,
            ``gb200_nvl72.json``.

    Raises:
        HardwareDataError: there is no such file.
    """
    if name not in _shipped_names():
        raise HardwareDataError(f"no hardware {name!r}; there are {', '.join(_shipped_names())}")
    return load_hardware(_shipped(name))


def load_hardware(text: str) -> Hardware:
    """Read a hardware data file.

    Args:
        text: JSON with ``name``, ``fixed_on`` and ``constants``, which maps each numeric field of
            ``Hardware`` to an object with the fields of ``Constant``. With ``based_on``, the name
            of a file that is shipped here, constants that are missing are that file's.

    Raises:
        HardwareDataError: the text is no such JSON; or a constant is missing, unknown or malformed,
            all of them at once.
    """
    document = _document(text)
    stored = _base_constants(document) | document["constants"]
    hints = {field.name: str(field.type) for field in fields(Hardware)}
    wanted = [name for name, hint in hints.items() if hint in ("float", "int")]
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in wanted]
    constants = {}
    for name in wanted:
        if name in stored:
            problems += _problems(name, stored[name], hints[name])
    if not problems and stored["collective_sms"]["value"] >= stored["num_sms"]["value"]:
        problems.append("collective_sms is not below num_sms: nothing is left beside a collective")
    if problems:
        raise HardwareDataError(
            f"hardware data of {document.get('name')!r}:\n  " + "\n  ".join(problems)
        )
    constants = {name: Constant(**stored[name]) for name in wanted}
    values: dict[str, Any] = {
        name: int(constant.value) if hints[name] == "int" else float(constant.value)
        for name, constant in constants.items()
    }
    return Hardware(
        name=document["name"],
        fixed_on=document["fixed_on"],
        constants=MappingProxyType(constants),
        **values,
    )


def _base_constants(document: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of the file that a document is based on; none without one."""
    base = document.get("based_on")
    if base is None:
        return {}
    if base not in _shipped_names():
        raise HardwareDataError(
            f"hardware data of {document.get('name')!r}: based_on is {base!r}; allowed: "
            f"{', '.join(_shipped_names())}"
        )
    of_base = _document(_shipped(base))
    constants: dict[str, Any] = of_base["constants"]
    return _base_constants(of_base) | constants


def _shipped_names() -> list[str]:
    folder = resources.files(__package__)
    return sorted(each.name for each in folder.iterdir() if each.name.endswith(".json"))


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise HardwareDataError(f"no hardware data: {_FORM}; {error}") from None
    if isinstance(document, dict) and {"name", "fixed_on", "constants"} <= document.keys():
        constants = document["constants"]
        if isinstance(constants, dict) and all(
            isinstance(each, dict) for each in constants.values()
        ):
            return document
    raise HardwareDataError(f"no hardware data: {_FORM}")


def _problems(name: str, stored: Mapping[str, object], hint: str) -> list[str]:
    names = {field.name for field in fields(Constant)}
    if set(stored) != names:
        return [f"{name} has the fields {sorted(stored)}, not {sorted(names)}"]
    problems = []
    value = stored["value"]
    may_be_zero = name in _MAY_BE_ZERO
    lowest = 0.0 if may_be_zero else math.ulp(0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < lowest:
        least = "a number from 0 on" if may_be_zero else "a number above 0"
        problems.append(f"{name} is {value!r}, not {least}")
    elif hint == "int" and value != int(value):
        problems.append(f"{name} is {value!r}, not a whole number")
    for field, allowed in (("kind", ConstantKind), ("scales_with", ScalesWith)):
        if stored[field] not in get_args(allowed):
            options = ", ".join(get_args(allowed))
            problems.append(f"{name}: {field} is {stored[field]!r}; allowed: {options}")
    if not stored["source"]:
        problems.append(f"{name} has no source")
    return problems
