"""A story that is told in a process of its own. A program may end that one: a kernel that reads memory which is not
its own, a check of an index that fails in a parallel loop, os._exit. It ends its story then, and not the command."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from graft.base.errors import GraftError, UsageError
from graft.stages.forked import forget_threads
from graft.stages.revive import revive
from graft.stages.story import Story, StoryEnd
from graft.workbench.stages.saved import FILE, story_text

T = TypeVar("T")
STEP, ERROR, DONE = "step.json", "error.json", "done"
CHECK = "index out of bounds"
INTERRUPT = {signal.SIGINT}
INTERRUPTED = 130
PATIENCE = 5.0  # seconds that an interrupted process has to end by itself


class FileKeeper:
    """Writes what is known to a folder, where the other process finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, stage: int, doing: str) -> None:
        self.write(STEP, json.dumps([stage, doing]))

    def story(self, story: Any) -> None:
        self.write(FILE, story_text(story))

    def write(self, name: str, text: str) -> None:
        """A file that is whole whenever the process ends."""
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.replace(self.folder / name)


def tell_apart(make: Callable[[FileKeeper], T], target: str, kind: type[T] = Story) -> T:
    """`make(keeper)`, a story of this kind, in a forked process; errors of graft's are raised here. Of a process that
    was ended by something else, the story up to there. Nothing may run here yet that does not live on in a forked
    process: no GPU, no threads of OpenMP."""
    with tempfile.TemporaryDirectory(prefix="graft-stages-") as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT)  # one that comes while a process is forked would be lost
        child = os.fork()
        if child == 0:
            work(folder, make)
        code = wait(child)
        if (folder / ERROR).is_file():
            raise sent(json.loads((folder / ERROR).read_text()))
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if (folder / DONE).is_file():  # what comes after it, as at the end of an interpreter, is nobody's business
            return read(folder, kind)
        return what_is_left(folder, target, code, kind)


def read(folder: Path, kind: type[T]) -> T:
    data = json.loads((folder / FILE).read_text())
    data.pop("format")
    return revive(kind, data)


def work(folder: Path, make: Callable[[FileKeeper], Any]) -> None:
    """In the forked process, which ends here whatever happens."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)
        end_with_parent()
        forget_threads()
        keeper = FileKeeper(folder)
        keeper.story(make(keeper))
        (folder / DONE).touch()
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:  # noqa: BLE001  it is raised again where it can be told
        send(error, folder)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # nobody may read them any more; the process must not go on as the other one does
            os._exit(code)


def end_with_parent() -> None:
    """A command that is killed leaves nothing running, where the system can see to that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def send(error: BaseException, folder: Path) -> None:
    """Of an error of graft's its class and message; of any other, which is a defect, the lines on standard error."""
    known = isinstance(error, GraftError)
    if not known:
        traceback.print_exception(error)
    kind = type(error)
    text = str(error) if known else f"the story could not be told: {kind.__name__}: {error}"
    found = {"module": kind.__module__, "kind": kind.__qualname__, "known": known, "text": text}
    (folder / ERROR).write_text(json.dumps(found))


def sent(found: dict[str, Any]) -> GraftError:
    kind: Any = getattr(import_module(found["module"]), found["kind"], GraftError) if found["known"] else GraftError
    error = kind.__new__(kind)  # its own arguments are in the message already
    error.args = (found["text"],)
    return error


def wait(child: int) -> int:
    """Its exit code, below zero for a signal. Interrupted here, it has some time to end."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        end(child)
        raise


def end(child: int) -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        os.kill(child, signal.SIGINT)
        os.waitpid(child, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def what_is_left(folder: Path, target: str, code: int, kind: type[T]) -> T:
    how = (
        f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"the process left with code {code}"
    )
    if not (folder / FILE).is_file():
        raise UsageError(f"{target} cannot be used: {how} before anything was compiled")
    story: Any = read(folder, kind)
    stage, doing = json.loads((folder / STEP).read_text())
    kernels = story.kernels.kernels if isinstance(story, Story) else ()
    running = doing.rpartition("in the code of graph ")[2]
    checked = [one.name for one in kernels if CHECK in one.source and one.graph == running]
    if checked and code < 0:
        how += f"; indices are checked in {' and '.join(checked)}, where a failed check in a parallel loop ends it so"
    return replace(story, end=StoryEnd(stage, doing, how))
