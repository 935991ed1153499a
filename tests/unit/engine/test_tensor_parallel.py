"""An engine on several processes: the tokens of one, its share of the memory, and an end that nobody waits for."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

import graft
from conftest import tiny
from graft.base.errors import EngineFailed, RankFailed, UsageError
from graft.dist import workers
from graft.dist.group import connect
from graft.dist.launcher import Launched, meeting_place
from graft.dist.sizes import check_heads, possible_sizes
from graft.models.load import load_model
from rank_events import BUILDING, events, watch

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 60))]
GREEDY = graft.SamplingParams(max_tokens=12, ignore_eos=True)
OPTIONS = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "max_num_batched_tokens": 32}
SOON = 400.0  # seconds, on the slowest machine; without a watch it would be the ten minutes of the group


def tokens_of(llm, params=GREEDY, prompts=PROMPTS):
    return [output.token_ids for output in llm.generate(prompts, params)]


def start(family="llama", world=2, backend="eager", **options):
    return graft.LLM(f"tiny-{family}", tensor_parallel_size=world, backend=backend, **OPTIONS, **options)


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = Launched("torchrun", 0, 2, 0, 2, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UsageError, match="the port is in use; set MASTER_PORT"):
            connect(0, 2, "gloo", lambda: meeting_place(found))


def test_a_network_interface_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    with pytest.raises(UsageError, match=r"no network interface .*none9.*; correct or unset GLOO_SOCKET_IFNAME"):
        connect(0, 1, "gloo", torch.distributed.HashStore)
    assert not torch.distributed.is_initialized()


def test_a_backend_that_torch_has_not_is_told(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(UsageError, match="this build of torch has no gloo"):
        connect(0, 2, "gloo", pytest.fail)


@pytest.fixture
def own_threads():
    """Ranks share the cores: rank 0 is this process, and has fewer threads from then on."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def one_and_two(tmp_path, monkeypatch):
    """The same model on one rank and on two, whose captures and compilations are watched."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name, value in watch(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "model"
    load_model("tiny-llama", dtype="float32", device="cpu").module.save_pretrained(folder)
    return tuple(graft.LLM(folder, tensor_parallel_size=n, backend="eager", **OPTIONS) for n in (1, 2))


@pytest.mark.usefixtures("own_threads")
def test_two_ranks_from_their_start_to_their_end(tmp_path, monkeypatch):
    """One test, because starting a process takes seconds."""
    one, two = one_and_two(tmp_path, monkeypatch)
    same_tokens(one, two)
    smaller(one, two)
    told(two)
    with pytest.raises(UsageError, match="a rank of another model already"):
        connect(0, 2, "gloo", pytest.fail)
    assert [each.count(BUILDING) for each in events(tmp_path / "site")] == [1], "of rank 1, which is another process"
    killed(two)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_threads")
def test_two_ranks_from_the_folder_that_they_wrote(tmp_path, monkeypatch):
    """Nothing is captured, transformed or compiled, on neither rank."""
    one, two = one_and_two(tmp_path, monkeypatch)
    two.save(tmp_path / "engine")
    two.engine.graph.close()
    shutil.rmtree(tmp_path / "site" / "events")
    (tmp_path / "site" / "events").mkdir()
    for name in ("capture", "transform", "lower"):
        monkeypatch.setattr(f"graft.engine.setup.assemble.{name}", pytest.fail)
    again = graft.LLM(tmp_path / "engine", kv_cache_memory="8MiB", max_num_batched_tokens=32)
    assert tokens_of(again) == tokens_of(one) and again.engine.graph.group.world == 2
    assert any(note.endswith("nothing was compiled") for note in again.report.notes)
    assert events(tmp_path / "site") == []
    again.engine.graph.close()  # so that another LLM may be loaded


def same_tokens(one, two):
    """Prompts in chunks, batches, samples that share blocks and part from each other. What a terminal or an init
    system sends to every process is rank 0's to act on, which may drain first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        two.engine.graph.workers.processes[1].send_signal(number)
    assert tokens_of(two) == tokens_of(one)
    sampled = graft.SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1, ignore_eos=True)
    alternatives = [[o.token_ids for o in llm.generate([PROMPTS[2]], sampled)[0].alternatives] for llm in (one, two)]
    assert alternatives[0] == alternatives[1]


def smaller(one, two):
    """Half of the heads in the cache, half of the weights in the graph."""
    assert two.engine.tensors[0].shape[2] * 2 == one.engine.tensors[0].shape[2]
    weights = [sum(p.nbytes for p in llm.graph_module.parameters()) for llm in (one, two)]
    assert weights[1] < 0.52 * weights[0]
    assert two.model.lazy.taken < 0.52 * sum(file.path.stat().st_size for file in two.model.lazy.files)


def told(two):
    record = two.report.transforms["shard_tensor_parallel"]
    assert record.status == "applied" and len(record.matches) == 6
    note = next(note for note in two.report.notes if note.startswith("tensor parallel"))
    assert re.search(r"2 ranks over gloo; 6 exchanges and .* a step; communication is \d+% of a step on rank 0", note)


def killed(two):
    """While it steps, the step fails; afterwards nothing is taken."""
    worker, started = two.engine.graph.workers.processes[1], time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed: it was killed by signal 9"):
        for count, _ in enumerate(steps_of(two)):
            if count == 2:
                worker.send_signal(signal.SIGKILL)
    with pytest.raises(EngineFailed, match="rank 1 failed"):
        two.generate(PROMPTS)
    assert time.monotonic() - started < SOON
    assert two.engine.graph.group.broken  # so that another LLM may be loaded


def steps_of(llm):
    request = llm.engine.make(PROMPTS[0], graft.SamplingParams(max_tokens=200, ignore_eos=True))
    with llm.driver.held() as engine:
        engine.enter(request)
        while request.finish_reason is None:
            yield from engine.step()


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "at least 1"),
        (True, "at least 1"),
        ("2", "at least 1"),
        (3, "the nearest that can: 2 or 4"),
        (8, "cannot share evenly; the nearest that can: 2 or 4 (all: 1, 2, 4)"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_told_at_once(size, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        graft.LLM("tiny-llama", tensor_parallel_size=size, **OPTIONS)


def test_sizes_follow_from_heads():
    assert possible_sizes(9, 3) == [1, 3, 9]
    assert possible_sizes(32, 8) == [1, 2, 4, 8, 16, 32]
    assert possible_sizes(12, 4) == [1, 2, 4, 12]
    with pytest.raises(UsageError, match="has 4 heads"):
        check_heads(tiny("gpt2").module.config, 3, "gpt2")


@pytest.mark.parametrize("more", [{"keep_weights": True}, {"loaded": True}])
def test_what_ranks_cannot_have_is_refused(more):
    model = tiny("llama") if more.pop("loaded", False) else "tiny-llama"
    with pytest.raises(UsageError, match="tensor_parallel_size=2: every rank"):
        graft.LLM(model, tensor_parallel_size=2, **OPTIONS, **more)


def test_another_number_of_processes_than_ranks_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="torchrun started 4 processes"):
        graft.LLM("tiny-llama", tensor_parallel_size=2, **OPTIONS)


# ── more processes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(
    ("family", "world", "backend"),
    [
        ("llama", 4, "eager"),
        ("qwen3-moe", 2, "eager"),
        ("gpt2", 2, "eager"),
        ("olmo-2", 4, "eager"),
        ("llama", 2, "auto"),
        ("deepseek-v2", 2, "eager"),
        ("deepseek-v3", 4, "auto"),
        ("gpt-oss", 2, "auto"),
        ("bitnet", 2, "eager"),
        ("lfm2", 2, "native"),
        ("qwen3-next", 4, "eager"),
    ],
)
def test_more_ranks_and_families_give_the_tokens_of_one(family, world, backend):
    expected = tokens_of(graft.LLM(f"tiny-{family}", backend=backend, **OPTIONS))
    llm = start(family, world, backend)
    assert tokens_of(llm) == expected
    processes = list(llm.engine.graph.workers.processes.values())
    del llm
    gc.collect()
    assert all(process.wait(SOON) is not None for process in processes)


@pytest.mark.exhaustive  # one step of two ranks: test_rank_steps.py
@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
def test_recurrent_states_are_on_every_rank(family):
    """More requests than slots, so that slots have new owners, prompts in chunks, and samples that part from one
    prompt."""
    prompts = [list(range(10 + each, 50 + each)) for each in range(5)]
    params = graft.SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=1, ignore_eos=True)
    found = []
    for world in (1, 2):
        llm = (
            start(family, world, max_num_seqs=3)
            if world > 1
            else graft.LLM(f"tiny-{family}", backend="eager", max_num_seqs=3, **OPTIONS)
        )
        found.append([[one.token_ids for one in output.alternatives] for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
    llm.engine.graph.close()


@pytest.mark.exhaustive  # ranks as threads: test_fuse_all_reduce_norm.py
@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(("world", "backend"), [(2, "eager"), (4, "eager"), (2, "native"), (4, "native")])
def test_a_sum_that_is_normed_by_one_op_gives_the_tokens_of_one(world, backend):
    """All sums of two layers but the last, whose rows are chosen before they are normed."""
    expected = tokens_of(graft.LLM("tiny-llama", backend=backend, **OPTIONS))
    llm = start("llama", world, backend, config={"transforms": {"fuse_all_reduce_norm": {"enabled": True}}})
    assert tokens_of(llm) == expected
    record = llm.report.transforms["fuse_all_reduce_norm"]
    assert record.status == "applied" and len(record.matches) == 3
    assert any("aten.add" in miss.reason for miss in record.near_misses), "the last"
    note = next(note for note in llm.report.notes if note.startswith("tensor parallel"))
    assert f"{world} ranks over gloo; 6 exchanges" in note
    llm.engine.graph.close()


COMMAND = [
    "-m",
    "graft",
    "run",
    "-m",
    "tiny-llama",
    "--token-ids",
    "5,6,7,8",
    "--dtype",
    "float32",
    "--backend",
    "eager",
]


@pytest.mark.exhaustive
def test_torchrun_starts_the_ranks_as_well():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29651"]
    asked = [*COMMAND, "--max-tokens", "6", "--tensor-parallel", "2"]
    done = subprocess.run([*launcher, *asked], capture_output=True, text=True, timeout=300, check=True)
    alone = subprocess.run(
        [sys.executable, *COMMAND, "--max-tokens", "6"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == alone.stdout.splitlines()[0]


@pytest.mark.exhaustive
def test_ranks_of_different_checkpoints_are_refused(tmp_path):
    """One number of one weight is another; every process ends, and says why."""
    module = load_model("tiny-llama", dtype="float32", device="cpu").module
    for rank in range(2):
        module.save_pretrained(tmp_path / str(rank))
        module.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = ["run", "--token-ids", "5,6", "--dtype", "float32", "--backend", "eager", "--tensor-parallel", "2"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "graft", *asked, "-m", str(tmp_path / str(rank))],
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=SOON)[1] for rank in ranks]
    assert all(rank.returncode == 1 for rank in ranks)
    assert all("rank 1 has another checkpoint than rank 0" in text for text in said)


@pytest.mark.exhaustive
def test_a_rank_without_memory_ends_the_start(monkeypatch):
    """The other process may have 3 GB of addresses, of which torch takes most; all are gone, with the reason."""
    start = workers.subprocess.Popen

    def limited(command, **options):
        own = ["/bin/sh", "-c", 'ulimit -v 3000000; exec "$@"', "sh", *command]
        return start(own if workers.MODULE in command else command, **options)

    monkeypatch.setattr(workers.subprocess, "Popen", limited)
    with pytest.raises(RankFailed, match=r"rank 1 failed: it ended with exit code 1: out of memory \("):
        graft.LLM("qwen2.5-0.5b", tensor_parallel_size=2, **OPTIONS)
    assert not torch.distributed.is_initialized()


@pytest.mark.exhaustive
def test_srun_starts_the_ranks_as_well():
    """Two tasks of one node, with the variables that Slurm sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"JOB_ID": 7, "STEP_ID": 0, "STEP_NUM_TASKS": 2, "NODEID": 0, "STEP_TASKS_PER_NODE": 2}
    step = {**os.environ, "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}
    step |= {f"SLURM_{name}": str(value) for name, value in told.items()}
    asked = [sys.executable, *COMMAND, "--max-tokens", "6"]
    tasks = [
        subprocess.Popen(
            [*asked, "--tensor-parallel", "2"], stdout=subprocess.PIPE, text=True,
            env={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    answer, nothing = (task.communicate(timeout=300)[0] for task in tasks)
    alone = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert [task.returncode for task in tasks] == [0, 0] and not nothing
    assert answer.splitlines()[0] == alone.stdout.splitlines()[0]


@pytest.mark.exhaustive
def test_ctrl_c_ends_all_ranks():
    asked = [sys.executable, *COMMAND, "--max-tokens", "250", "--tensor-parallel", "2"]
    run = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    workers = wait_for_worker(run.pid)
    time.sleep(1)
    os.killpg(run.pid, signal.SIGINT)
    _, told = run.communicate(timeout=SOON)
    assert run.returncode and "interrupted" in told
    until = time.monotonic() + SOON
    while any(map(is_running, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(is_running, workers))


def wait_for_worker(parent):
    until = time.monotonic() + 300
    while time.monotonic() < until:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False
        )
        if listed.stdout.split():
            return [int(pid) for pid in listed.stdout.split()]
        time.sleep(0.2)
    raise AssertionError("no worker came")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
