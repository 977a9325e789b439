"""Cluster files: those that are shipped, and what is wrong with others."""

import pytest

from gt_passes.simulation import h100_sxm
from gt_trainer.planning.cluster import (
    ClusterFileError,
    load_cluster,
    parse_cluster,
    shipped_clusters,
)
from gt_trainer.planning.plan_answer import LLAMA3_FAILURES_PER_GPU_DAY


def test_ships_four_clusters_whose_figures_all_have_a_source():
    assert shipped_clusters() == ["gb200_nvl72", "h100_hbm2e_500w", "h100_sxm", "h200"]
    for name in shipped_clusters():
        cluster = load_cluster(name)
        assert len(cluster.sources) == 7
        assert all(cluster.sources.values())


def test_the_failure_rate_is_the_published_one():
    published = pytest.approx(LLAMA3_FAILURES_PER_GPU_DAY, rel=1e-3)
    assert load_cluster("h100_sxm").failures_per_gpu_day == published


def test_an_nvlink_domain_of_gb200_has_72_gpus():
    assert load_cluster("gb200_nvl72").hardware.gpus_per_node == 72
    assert load_cluster("h200").hardware.hbm_capacity_bytes == 141_000_000_000


def test_a_host_of_gb200_has_four_of_its_domains_gpus():
    assert load_cluster("gb200_nvl72").gpus_per_host == 4
    assert load_cluster("h100_sxm").gpus_per_host == 8


def test_oversubscription_slows_what_leaves_a_node():
    text = _text().replace("value = 1.0", "value = 4.0")
    cluster = parse_cluster(text, where="mine", folder=None)
    at_once = h100_sxm().nic_effective_bytes_per_s / 4
    assert cluster.hardware.nic_effective_bytes_per_s == at_once
    assert cluster.hardware.nvlink_bus_bytes_per_s == h100_sxm().nvlink_bus_bytes_per_s


def test_a_constant_of_the_hardware_can_be_set():
    text = _text() + '[constants.gpus_per_node]\nvalue = 4\nsource = "ours"\n'
    assert parse_cluster(text, where="mine", folder=None).hardware.gpus_per_node == 4


def test_takes_a_file_and_its_hardware_file(tmp_path):
    (tmp_path / "mine.toml").write_text(_text().replace("H100 SXM", "Ours"))
    assert load_cluster(str(tmp_path / "mine.toml")).hardware.name == "Ours"


def test_relaxed_clusters_have_other_nics_or_more_memory():
    cluster = load_cluster("h100_sxm")
    nics = cluster.with_relaxed({"nic": 800}).hardware
    assert nics.nic_effective_bytes_per_s == 2 * cluster.hardware.nic_effective_bytes_per_s
    assert nics.name == "H100 SXM (nic 800)"
    memory = cluster.with_relaxed({"memory": 141}).hardware
    assert memory.hbm_capacity_bytes == 141_000_000_000


def test_every_typo_is_named_with_the_nearest_key():
    text = (
        _text()
        .replace("price_per_gpu_hour", "price_per_gpu_hours")
        .replace("value = 700.0", "value = -1")
        .replace('name = "H100 SXM"', 'nam = "H100 SXM"')
    )
    text += '[constants.nic_bytes_per_sec]\nvalue = 1.0\nsource = "x"\n'
    with pytest.raises(ClusterFileError) as raised:
        parse_cluster(text, where="mine.toml", folder=None)
    assert str(raised.value) == (
        "cluster file mine.toml:\n"
        "  no key 'nam'. Did you mean 'name'?\n"
        "  name is missing\n"
        "  no figure 'price_per_gpu_hours'. Did you mean 'price_per_gpu_hour'?\n"
        "  figures.price_per_gpu_hour is missing\n"
        "  figures.power_watts_per_gpu.value is -1, and must be a number above 0\n"
        "  no constant 'nic_bytes_per_sec'. Did you mean 'nic_bytes_per_s'?"
    )


def test_a_name_that_is_none_is_told_with_the_nearest():
    with pytest.raises(ClusterFileError, match=r"no cluster 'h100'\. Did you mean 'h200'\?"):
        load_cluster("h100")


def test_refuses_what_is_no_toml():
    with pytest.raises(ClusterFileError, match="mine is no TOML: "):
        parse_cluster("{", where="mine", folder=None)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("nan", "nan, and must be a number above 0"),
        ("inf", "inf, and must be a number above 0"),
        ("0.5", "0.5, and must be 1 or more"),
    ],
)
def test_oversubscription_is_a_number_of_one_or_more(value, problem):
    text = _text().replace("value = 1.0", f"value = {value}")
    with pytest.raises(ClusterFileError) as raised:
        parse_cluster(text, where="mine", folder=None)
    assert str(raised.value) == f"cluster file mine:\n  figures.oversubscription.value is {problem}"


def test_a_host_has_a_whole_number_of_gpus():
    text = _text().replace(
        "[figures.gpus_per_host]\nvalue = 8", "[figures.gpus_per_host]\nvalue = 7.5"
    )
    with pytest.raises(ClusterFileError, match=r"gpus_per_host.value is 7.5, and must be a whole"):
        parse_cluster(text, where="mine", folder=None)


def test_whole_numbers_are_not_cut_from_fractions():
    text = _text() + '[constants.gpus_per_node]\nvalue = 7.5\nsource = "ours"\n'
    with pytest.raises(ClusterFileError, match=r"value is 7\.5, and must be a whole number"):
        parse_cluster(text, where="mine", folder=None)


def test_refuses_what_is_no_table_or_no_text(tmp_path):
    text = 'name = "a"\nhardware = "h100_sxm.json"\nfigures = 3\n'
    with pytest.raises(ClusterFileError, match="figures is 3, and must be a table"):
        parse_cluster(text, where="mine", folder=None)
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterFileError, match=r"mine\.toml is not UTF-8: "):
        load_cluster(str(tmp_path / "mine.toml"))


def _text():
    from importlib import resources

    folder = resources.files("gt_trainer.planning") / "clusters"
    return (folder / "h100_sxm.toml").read_text("utf-8")
