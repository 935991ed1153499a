"""Who started this process as one of several, by the variables that torchrun and srun set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import UsageError
from graft.dist.launcher import PORTS, Launched, first_host, launched, tasks_of_each

STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08],old3", "SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0",
}  # fmt: skip


def test_nobody_did():
    assert launched({}) is None and launched({**STEP, "GRAFT_LAUNCHER": "none"}) is None
    assert launched({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None, "the script of sbatch"
    assert launched({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None, "graft starts its ranks itself"


def test_torchrun_did():
    asked = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    assert launched({**STEP, **asked}) == Launched("torchrun", 3, 4, 1, 2, "a", 29500)
    assert launched({"RANK": "1", "WORLD_SIZE": "2"}) == Launched("torchrun", 1, 2, 1, 2, "127.0.0.1", 29500)


def test_srun_did():
    found = launched(STEP)
    assert found == Launched("srun", 4, 5, 0, 1, "gpu07", found.port) and found.port in PORTS
    first = launched({**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert (first.sharing, first.local, first.port) == (2, 1, found.port)
    assert launched({**STEP, "SLURM_STEP_ID": "3"}).port != found.port, "steps of a job run beside each other"
    assert launched({**STEP, "MASTER_ADDR": "b", "MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize(
    "wrong", [{"SLURM_STEP_TASKS_PER_NODE": "x"}, {"SLURM_PROCID": ""}, {"SLURM_NODEID": "x"}, {"SLURM_NODEID": "9"}, {"RANK": "a", "WORLD_SIZE": "2"}]
)
def test_variables_that_say_nothing_are_told(wrong):
    with pytest.raises(UsageError, match="the launcher's variables cannot be read"):
        launched({**STEP, **wrong})
    with pytest.raises(UsageError, match="KeyError: 'SLURM_LOCALID'"):
        launched({name: value for name, value in STEP.items() if name != "SLURM_LOCALID"})


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_tasks_of_each_node(parts):
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in parts)
    assert tasks_of_each(text) == [count for count, times in parts for _ in range(times)]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a1", "a1"), ("a1,b2", "a1"), ("a[1,3]", "a1"), ("rack2-n[007-009].local,x", "rack2-n007.local"), ("a-b[12]", "a-b12"), ("r[0-1]n[3-4],x", "r0n3")],
)
def test_the_first_machine_of_a_list(nodes, host):
    assert first_host(nodes) == host
