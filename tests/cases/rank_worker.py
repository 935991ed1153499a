"""A worker without a model: it does what its task says."""

from __future__ import annotations

import os
import sys
import time

from graft.dist.workers import take_over

if __name__ == "__main__":
    if os.environ.get("RANK_WORKER") == "deaf":  # it never reads what it is told, nor the end of it
        time.sleep(600)
    message = take_over()
    print(f"rank {message['rank']} of {message['world']} was told {message['task']}", flush=True)
    if message["task"] == f"fail {message['rank']}":
        print("no memory left here", flush=True)
        sys.exit(3)
    time.sleep(600)
