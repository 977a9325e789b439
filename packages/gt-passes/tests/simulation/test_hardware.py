"""The data file of the H100: complete, sourced, and not changed by accident."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

import pytest

from gt_passes.simulation import h100_hbm2e_500w, h100_sxm
from gt_passes.simulation.hardware import HardwareDataError, load_hardware

TEXT = resources.files("gt_passes.simulation").joinpath("h100_sxm.json").read_text("utf-8")


def test_no_value_has_changed_since_the_file_was_fixed():
    """A new value needs a reason: in docs/decisions/0007-cost-model.md, then here."""
    values = {name: constant.value for name, constant in h100_sxm().constants.items()}
    pinned = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    assert (h100_sxm().fixed_on, pinned[:16]) == ("2026-11-26", "f37452aec83b8d67")


def test_every_constant_has_a_source_and_only_efficiencies_and_overheads_are_assumed():
    constants = h100_sxm().constants
    assert all(len(constant.source) > 10 for constant in constants.values())
    assumed = {name for name, constant in constants.items() if constant.kind == "assumption"}
    assert not {name for name in assumed if name.startswith(("peak_", "nccl_ring", "nccl_tree"))}
    assert {"hbm_bytes_per_s", "nvlink_bytes_per_s", "nic_bytes_per_s"}.isdisjoint(assumed)


def test_data_sheet_values_are_those_of_the_data_sheet():
    hardware = h100_sxm()
    assert hardware.peak_bf16_flops_per_s == 989.4e12
    assert hardware.hbm_bytes_per_s == 3.35e12
    assert hardware.nvlink_bytes_per_s == 450e9
    assert hardware.nic_bytes_per_s * 8 == 400e9
    assert hardware.num_sms == 132


def test_what_can_be_achieved_is_below_what_the_data_sheet_says():
    hardware = h100_sxm()
    assert hardware.nvlink_bus_bytes_per_s < hardware.nvlink_bytes_per_s
    assert hardware.nic_effective_bytes_per_s < hardware.nic_bytes_per_s
    efficiencies = [n for n in hardware.constants if n.endswith(("_efficiency", "_speed"))]
    assert efficiencies
    assert all(0 < getattr(hardware, name) <= 1 for name in efficiencies)


def test_scaling_moves_one_group_and_leaves_the_others():
    hardware = h100_sxm()
    faster = hardware.scaled("network", 1.3)
    assert faster.nvlink_bus_bytes_per_s == pytest.approx(1.3 * hardware.nvlink_bus_bytes_per_s)
    assert faster.hbm_bytes_per_s == hardware.hbm_bytes_per_s
    slower = hardware.scaled("latency", 0.5)
    assert slower.host_kernel_us == 2 * hardware.host_kernel_us
    assert slower.peak_bf16_flops_per_s == hardware.peak_bf16_flops_per_s
    assert hardware.scaled("compute", 2.0).matmul_efficiency == hardware.matmul_efficiency


def test_refuses_to_scale_by_nothing():
    with pytest.raises(ValueError, match="factor is 0; allowed: a number above 0"):
        h100_sxm().scaled("compute", 0)


def test_every_problem_of_a_data_file_is_told_at_once():
    document = json.loads(TEXT)
    del document["constants"]["num_sms"]
    document["constants"]["flux_capacitors"] = document["constants"]["hbm_bytes_per_s"]
    document["constants"]["gpus_per_node"]["value"] = 7.5
    document["constants"]["matmul_efficiency"]["kind"] = "hearsay"
    document["constants"]["kernel_fixed_us"]["source"] = ""
    document["constants"]["collective_sms"]["value"] = -1
    document["constants"]["nccl_channels"]["value"] = 0
    with pytest.raises(HardwareDataError) as caught:
        load_hardware(json.dumps(document))
    kinds = "data sheet, published measurement, published source, own measurement, assumption"
    assert str(caught.value).splitlines() == [
        "hardware data of 'H100 SXM':",
        "  num_sms is missing",
        "  flux_capacitors is unknown",
        f"  matmul_efficiency: kind is 'hearsay'; allowed: {kinds}",
        "  kernel_fixed_us has no source",
        "  gpus_per_node is 7.5, not a whole number",
        "  nccl_channels is 0, not a number above 0",
        "  collective_sms is -1, not a number from 0 on",
    ]


def test_a_collective_leaves_multiprocessors_to_others():
    document = json.loads(TEXT)
    document["constants"]["collective_sms"]["value"] = 132
    with pytest.raises(HardwareDataError) as caught:
        load_hardware(json.dumps(document))
    assert str(caught.value).splitlines() == [
        "hardware data of 'H100 SXM':",
        "  collective_sms is not below num_sms: nothing is left beside a collective",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "fixed_on": "y", "constants": 1}'])
def test_what_is_no_data_file_is_refused(text):
    with pytest.raises(HardwareDataError, match="no hardware data: JSON with name, fixed_on and"):
        load_hardware(text)


def test_a_file_may_say_only_what_differs_from_a_shipped_one():
    slower, base = h100_hbm2e_500w(), h100_sxm()
    differing = {n for n in base.constants if getattr(slower, n) != getattr(base, n)}
    peaks = {f"peak_{kind}_flops_per_s" for kind in ("bf16", "fp8", "tf32", "fp32", "fp64")}
    reached = {"matmul_efficiency", "matmul_fp8_efficiency", "hbm_streaming_efficiency"}
    assert differing == peaks | reached | {"hbm_bytes_per_s", "hbm_capacity_bytes"}
    assert all(getattr(slower, name) < getattr(base, name) for name in peaks)
    assert slower.hbm_bytes_per_s == 2.4e12
    # 0.6 of the data sheet's, in either precision.
    bf16 = slower.peak_bf16_flops_per_s * slower.matmul_efficiency
    fp8 = slower.peak_fp8_flops_per_s * slower.matmul_fp8_efficiency
    assert bf16 == pytest.approx(0.6 * base.peak_bf16_flops_per_s, rel=0.01)
    assert fp8 == pytest.approx(0.6 * base.peak_fp8_flops_per_s, rel=0.01)
    # What is assumed says so.
    assert {slower.constants[name].kind for name in peaks} == {"assumption"}


def test_a_file_that_is_based_on_none_that_is_shipped_is_refused():
    text = json.dumps({"name": "x", "fixed_on": "", "constants": {}, "based_on": "../x.json"})
    with pytest.raises(HardwareDataError) as error:
        load_hardware(text)
    assert str(error.value) == (
        "hardware data of 'x': based_on is '../x.json'; allowed: gb200_nvl72.json, "
        "h100_hbm2e_500w.json, h100_sxm.json, h200.json"
    )
