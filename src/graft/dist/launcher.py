"""Ranks that a launcher started: torchrun, which says so in RANK and WORLD_SIZE, or srun in variables of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import distributed

from graft.base.errors import UsageError
from graft.dist.group import STUCK

OWN = "GRAFT_LAUNCHER"  # none: a process below a launcher's, a replica on Ray, say, that is no rank of it
PORTS = range(20_000, 30_000)  # of which a step of a Slurm job has one, the same on every machine


@dataclass(frozen=True)
class Launched:
    """local, sharing: this rank among those of its machine, and how many they are. host, port: where all meet."""

    by: str
    rank: int
    world: int
    local: int
    sharing: int
    host: str
    port: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """None: nobody started this process as one of several, or GRAFT_LAUNCHER=none says that it stands for itself."""
    if environment.get(OWN) == "none":
        return None
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return by_torchrun(environment)
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # not set in a script that sbatch runs
            return by_srun(environment)
    except (LookupError, ValueError) as error:
        raise UsageError(f"the launcher's variables cannot be read: {type(error).__name__}: {error}") from error
    return None


def by_torchrun(found: Mapping[str, str]) -> Launched:
    rank, world = int(found["RANK"]), int(found["WORLD_SIZE"])
    local, sharing = int(found.get("LOCAL_RANK", rank)), int(found.get("LOCAL_WORLD_SIZE", world))
    host, port = found.get("MASTER_ADDR", "127.0.0.1"), int(found.get("MASTER_PORT", "29500"))
    return Launched("torchrun", rank, world, local, sharing, host, port)


def by_srun(found: Mapping[str, str]) -> Launched:
    """Rank 0 is on the first machine of the step; MASTER_ADDR and MASTER_PORT, where they are set, count."""
    counts = tasks_of_each(found["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(found["SLURM_JOB_ID"]), int(found["SLURM_STEP_ID"])
    host = found.get("MASTER_ADDR") or first_host(found["SLURM_STEP_NODELIST"])
    port = int(found.get("MASTER_PORT") or PORTS[(97 * job + step) % len(PORTS)])
    return Launched(
        "srun", int(found["SLURM_PROCID"]), int(found["SLURM_STEP_NUM_TASKS"]), int(found["SLURM_LOCALID"]),
        counts[int(found["SLURM_NODEID"])], host, port,
    )  # fmt: skip


def tasks_of_each(text: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if read is None:
            raise ValueError(f"{text!r} is no list of tasks of each node")
        found += [int(read[1])] * int(read[2] or 1)
    return found


def first_host(nodes: str) -> str:
    """`gpu[03-05,9],cpu1` → gpu03."""
    read = re.match(r"(?:[^\[,]|\[\d[^\]]*\])+", nodes)
    if read is None:
        raise ValueError(f"{nodes!r} is no list of nodes")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", read[0])


def meeting_place(found: Launched) -> Any:
    """The store where the ranks meet. Made here, and not by init_process_group: one that fails in there leaves a count
    behind, by which the groups of a later one have other names on each rank."""
    hosts = found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = (found.host, found.port, found.world)
    try:
        store = distributed.TCPStore(*where, is_master=hosts, timeout=STUCK, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        used = "EADDRINUSE" in str(error) or "in use" in str(error)
        why = "the port is in use; set MASTER_PORT to another" if used else told
        raise UsageError(f"the ranks cannot meet at {found.host}:{found.port}: {why}") from error
    return distributed.PrefixStore("graft", store)
