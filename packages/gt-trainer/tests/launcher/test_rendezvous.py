"""Reading torchrun's and Slurm's environments."""

import pytest

from gt_trainer.launcher.rendezvous import RendezvousError, find_rendezvous, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_NTASKS": "16",
    "SLURM_JOB_NODELIST": "gpu[001-016]",
    "SLURM_JOB_ID": "123456",
}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def test_a_process_started_on_its_own_belongs_to_no_job():
    assert find_rendezvous({"PATH": "/bin", "LOCAL_RANK": "0"}) is None


def test_torchruns_variables_are_taken_as_they_are():
    rendezvous = find_rendezvous(TORCHRUN)
    assert rendezvous is not None
    assert rendezvous.environment() == TORCHRUN
    assert rendezvous.source == "torchrun"


def test_torchrun_need_not_say_the_local_world_size():
    rendezvous = find_rendezvous(without(TORCHRUN, "LOCAL_WORLD_SIZE"))
    assert rendezvous is not None
    assert rendezvous.local_world_size is None
    assert "LOCAL_WORLD_SIZE" not in rendezvous.environment()


def test_an_incomplete_torchrun_environment_is_refused_with_all_that_is_missing():
    with pytest.raises(RendezvousError) as refused:
        find_rendezvous({"RANK": "0", "LOCAL_RANK": "0"})
    assert str(refused.value) == (
        "the environment has RANK, LOCAL_RANK but lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT: set "
        "all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun does, or unset "
        "them all and use --nproc"
    )


def test_contradictions_are_listed_together():
    wrong = {**TORCHRUN, "RANK": "8", "LOCAL_RANK": "-1", "MASTER_PORT": "70000"}
    with pytest.raises(RendezvousError) as refused:
        find_rendezvous(wrong)
    assert str(refused.value) == (
        "torchrun's environment is wrong: rank 8 is outside 0..7 of world size 8; local rank -1 is "
        "negative; port 70000 is outside 0..65535"
    )


def test_a_number_that_is_none_is_named():
    with pytest.raises(RendezvousError) as refused:
        find_rendezvous({**TORCHRUN, "RANK": "two"})
    assert str(refused.value) == "RANK is 'two', which is no integer"


def test_a_slurm_step_is_described_by_the_steps_variables_before_the_jobs():
    rendezvous = find_rendezvous(SLURM)
    assert rendezvous is not None
    assert rendezvous.source == "Slurm"
    assert rendezvous.environment() == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "24195",
    }


def test_an_older_slurm_step_is_described_by_the_job():
    old = without(SLURM, *(name for name in SLURM if name.startswith("SLURM_STEP_")))
    rendezvous = find_rendezvous({**old, "SLURM_STEP_ID": "0"})
    assert rendezvous is not None
    assert (rendezvous.world_size, rendezvous.master_addr) == (16, "gpu001")
    assert rendezvous.local_world_size is None


def test_every_task_of_a_step_finds_the_same_meeting_point_and_steps_differ():
    def meeting_point(**changes):
        rendezvous = find_rendezvous({**SLURM, **changes})
        return rendezvous.master_addr, rendezvous.master_port

    assert meeting_point() == meeting_point(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert meeting_point() != meeting_point(SLURM_STEP_ID="4")
    assert meeting_point() != meeting_point(SLURM_JOB_ID="123457")


def test_the_meeting_point_can_be_given_under_slurm():
    rendezvous = find_rendezvous({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert rendezvous is not None
    assert (rendezvous.master_addr, rendezvous.master_port) == ("10.0.0.1", 1234)


def test_a_batch_shell_is_no_step_and_a_step_of_one_task_is_no_job():
    assert find_rendezvous(without(SLURM, "SLURM_STEP_ID")) is None
    assert find_rendezvous({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_inside_slurm_is_torchrun():
    rendezvous = find_rendezvous({**SLURM, **TORCHRUN})
    assert rendezvous is not None
    assert rendezvous.source == "torchrun"


def test_an_incomplete_slurm_step_is_refused_with_all_that_is_missing():
    with pytest.raises(RendezvousError) as refused:
        find_rendezvous({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"})
    assert str(refused.value) == (
        "this process is a task of a Slurm job step, but its environment lacks SLURM_LOCALID, "
        "SLURM_JOB_NODELIST, SLURM_JOB_ID: start it with srun, or set RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR and MASTER_PORT yourself"
    )


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-010,12],login1", "gpu007"),
        ("gpu[12,3-5]", "gpu12"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("a-b[3]-ib.example.org,c", "a-b3-ib.example.org"),
        ("n[0-1],m[5-6]", "n0"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",", "gpu[1-2", "gpu]1[", "gpu[a-b]"])
def test_a_malformed_node_list_is_refused(nodelist):
    with pytest.raises(RendezvousError, match="node list"):
        first_host(nodelist)
