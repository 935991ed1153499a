"""A rank that rank 0 started: `python -m graft.engine.launch.worker`, told what to do by its standard input."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from graft.base.errors import GraftError
from graft.dist.workers import take_over


def main() -> None:
    """Ctrl-C, and SIGTERM that an init system sends to all processes of a server, are for rank 0, which may have
    requests to end first: its end is the end of this."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    message = take_over()
    try:
        work(message["rank"], message["world"], message["port"], message["task"])
    except GraftError as error:
        print(error, flush=True)
    except BaseException as error:  # noqa: BLE001  rank 0 reads it in the log
        from graft.base.device_memory import is_out_of_memory  # imports torch, which may take long

        if is_out_of_memory(error):
            from graft.engine.launch.start import out_of_memory

            print(out_of_memory(error), flush=True)
        else:
            traceback.print_exc()
            sys.stderr.flush()
    else:
        os._exit(0)
    os._exit(1)  # without waiting for exchanges that others will never answer


def work(rank: int, world: int, port: int, task: object) -> None:
    import torch

    from graft.dist.group import connect
    from graft.engine.artifact.request import EngineRequest
    from graft.engine.launch.start import HOST, THREADS, build_rank, follow_rank
    from graft.engine.ranks.task import RankPlace, place_of

    assert isinstance(task, EngineRequest)
    device, backend, sharers = place_of(task.device, rank, world)
    threads = int(os.environ[THREADS]) if backend == "gloo" else None
    if threads is not None:
        torch.set_num_threads(threads)
    store = torch.distributed.TCPStore(HOST, port, world, is_master=False)
    store.set(f"rank{rank}", "here")
    group = connect(rank, world, backend, lambda: store)
    follow_rank(build_rank(task, RankPlace(group, device, sharers, threads)), group)


if __name__ == "__main__":
    main()
