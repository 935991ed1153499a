"""The processes of a run, forked from one that has imported torch, transformers and the test files.

Each of them would import the same for half a minute. One process imports torch and transformers, and forks itself:
the first goes on to be what tests fork programs from (`cases/processes.py`), the second imports every test file, with
all that those import, and is what the workers of the run are forked from. Each listens on a socket, and takes streams
and arguments. xdist starts fork_client.py, a Python without anything, which hands over its own.

Only on Linux, and only where there is no GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PROGRAMS = "GRAFT_TEST_FORKS"  # the variable with the socket of the process that has torch, but not graft

# what graft imports, less graft: a program that a test starts may have another one
IMPORTED = (
    *("torch", "transformers.modeling_utils", "torch._dynamo", "torch.export", "torch.fx.experimental.proxy_tensor"),
    *("torch._inductor.compile_fx", "networkx", "pydantic", "typer"),
)


PATH = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def installed(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None


def forks() -> bool:
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def fork_workers(specs: Sequence[Any], arguments: Sequence[str]) -> Callable[[], None]:
    """xdist starts its workers from a process that has collected the tests; what is given back ends that process."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
    folder, end = start("programs", "workers", arguments=arguments)
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-S", "-E", str(HERE / "fork_client.py"), f"{folder}/workers"])
    return end


def start(*names: str, arguments: Sequence[str] = ()) -> tuple[str, Callable[[], None]]:
    """A parent for programs, and one for workers where that is named: the folder of their sockets, and their end."""
    folder = tempfile.mkdtemp(prefix="graft-forks-")
    listeners = [listen(f"{folder}/{name}") for name in names]
    numbers = [listener.fileno() for listener in listeners]
    environment = {**os.environ, PROGRAMS: f"{folder}/programs", "OMP_NUM_THREADS": "1"}  # threads do not fork
    parent = subprocess.Popen(
        [sys.executable, str(HERE / "fork_parent.py"), json.dumps(numbers), json.dumps([*arguments])],
        stdin=subprocess.PIPE, pass_fds=numbers, env=environment,
    )  # fmt: skip
    for listener in listeners:
        listener.close()  # a client is refused when the parent has ended

    def end() -> None:
        parent.communicate()  # it ends when its input does
        shutil.rmtree(folder)

    return folder, end


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def serve(listener: socket.socket, *others: int) -> None:
    """Forks for each client, until the input ends, and tells it the number of the process and how that ended; what is
    left then is killed, and `others` waited for. Comes back in the forked processes, when their program has ended."""
    gc.collect()
    gc.freeze()
    assert not forks() or len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the forked processes"
    clients = dict[int, socket.socket]()
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    while 0 not in (ready := select.select([listener, ended, 0], [], [])[0]):
        if ended in ready:
            ended.recv(4096)
            for child, status in [os.waitpid(child, os.WNOHANG) for child in clients]:
                if child:
                    answer(clients.pop(child), os.waitstatus_to_exitcode(status), last=True)
        if listener in ready:
            connection, _ = listener.accept()
            if (child := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                become(connection)
                return
            clients[child] = connection
            answer(connection, child)
    for child in clients:
        os.kill(child, signal.SIGKILL)
    for child in (*clients, *others):
        os.waitpid(child, 0)
    os._exit(0)


def answer(connection: socket.socket, number: int, last: bool = False) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # who asked may have gone
        connection.sendall(f"{number}\n".encode())
    if last:
        connection.close()


def become(connection: socket.socket) -> None:
    """Runs the client's program with its streams, as an interpreter that has just started."""
    message, streams = b"", list[int]()
    while not message.endswith(b"\n"):
        part, handed, _, _ = socket.recv_fds(connection, 65536, 3)
        message += part
        streams += handed
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    errors = open(2, "wb", buffering=0, closefd=False)  # noqa: SIM115
    # as the interpreter has it: what a full disk did not take is not tried again at the end
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, errors="backslashreplace", write_through=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job = json.loads(message)
    if "environment" in job:
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["cwd"])
    kind, *rest = job["arguments"]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    if kind == "-u":  # the workers of xdist write to their streams themselves
        kind, *rest = rest
    if kind in ("-c", "-m"):
        sys.path.insert(0, "" if kind == "-c" else os.getcwd())
        sys.argv = [kind, *rest[1:]]
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, os.path.dirname(kind))
    run(kind, rest)


def run(kind: str, rest: Sequence[str]) -> None:
    sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(kind, run_name="__main__")


def main(listeners: Sequence[int], arguments: Sequence[str]) -> None:
    for name in filter(installed, IMPORTED):
        importlib.import_module(name)
    programs, *workers = [socket.socket(fileno=number) for number in listeners]
    if not workers:
        serve(programs)
    elif (child := os.fork()) != 0:
        workers[0].close()
        serve(programs, child)
    else:
        programs.close()
        collect(arguments)
        serve(workers[0])


def collect(arguments: Sequence[str]) -> None:
    """Imports the test files, as the workers will."""
    import pytest

    from precompiled import link_with_gold, precompile_headers
    from warm_up import warm_up

    precompile_headers(Path(os.environ["GRAFT_NATIVE_CACHE_DIR"]))
    link_with_gold(Path(os.environ["GRAFT_TEST_BUILDS"]))

    class NoItems:
        @pytest.hookimpl(tryfirst=True)
        def pytest_pycollect_makeitem(self) -> list[Any]:
            return []  # the tests themselves are listed in each worker, which takes 2 of the 16 seconds

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        pytest.main([*arguments, "--collect-only", "-qq", "-n0", "-p", "no:cacheprovider"], plugins=[NoItems()])
    warm_up()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
