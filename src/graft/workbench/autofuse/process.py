"""A trial in its own process, with a limit: what hangs, crashes or corrupts memory ends there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graft
from graft.workbench.autofuse.trial import TrialOrder

LAST = 300  # characters of what it said before it died


def run_trial(order: TrialOrder, search: Sequence[Path], limit: float) -> dict[str, Any]:
    """What the trial found; `failure` says what ended it. search: folders that Python finds packages in."""
    with tempfile.TemporaryDirectory(prefix="graft-autofuse-") as folder:
        asked, found, said = (Path(folder) / name for name in ("trial.json", "result.json", "said.txt"))
        asked.write_text(order.text())
        command = [sys.executable, "-P", "-m", "graft.workbench.autofuse.trial", str(asked), str(found)]
        with said.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment(order, search),
            )  # fmt: skip
            ended = wait(child, limit)
        data = read(found)
        if ended:
            told = " ".join(said.read_text(errors="replace").split())[-LAST:]
            last = f"; it said last: {told}" if told and "longer" not in ended else ""
            data["failure"] = f"{ended} in its part {data['phase']!r}{last}"
            data["phase"] = "out of time" if "longer" in ended else "failed"
        return data


def environment(order: TrialOrder, search: Sequence[Path]) -> dict[str, str]:
    root = str(Path(graft.__file__).parent.parent)
    paths = [*map(str, search), root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # what else is installed has no say in the generated tests
    # Triton's kernels are run by its interpreter where there is no GPU
    return {**os.environ, **own, **({} if order.on_gpu else {"TRITON_INTERPRET": "1"})}


def wait(child: subprocess.Popen[bytes], limit: float) -> str:
    """'' where it ended well, else how it ended. Its own children end with it."""
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        end(child)
        return f"took longer than {limit:.0f} s"
    except BaseException:  # Ctrl-C: nothing is left running
        end(child)
        raise
    if code == 0:
        return ""
    return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def end(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {"phase": "start", "checks": [], "times": [], "failure": "", "kernels": []}
