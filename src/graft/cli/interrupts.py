"""Ctrl-C ends the program with one line, also where it falls into an import.

Broken off, an import does not always give KeyboardInterrupt: numpy's C code makes RuntimeError of it, transformers'
lazy modules ImportError, others swallow it. So the interrupt waits until the import has ended, seconds at most;
whoever presses again breaks it off.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace

LINE = "graft: interrupted; nothing half-written was left behind"
PAUSE = 0.02  # seconds between two looks at whether the import has ended


def fresh() -> SimpleNamespace:
    """waiting: pressed during an import, and not raised yet. ours: the signal on its way is the one that was put off.
    broken: pressed again, and an import was broken off. No dataclass, because importing those takes 20 ms, in which
    nobody handles Ctrl-C yet."""
    return SimpleNamespace(waiting=False, ours=False, broken=False)


state = fresh()


def watch() -> None:
    """Takes the place of Python's own handler; a process that ignores Ctrl-C (nohup) goes on to."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def handle(number: int, frame: FrameType | None) -> None:
    again, state.ours = state.waiting and not state.ours, False
    if not in_import(frame):
        state.waiting = False
        signal.default_int_handler(number, frame)
    elif again:
        state.broken = True
        signal.default_int_handler(number, frame)
    elif not state.waiting:
        state.waiting = True
        threading.Thread(target=send_later, daemon=True).start()


def in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def send_later() -> None:
    """Interrupts the main thread once it imports nothing."""
    main = threading.main_thread().ident
    while state.waiting and main is not None:
        time.sleep(PAUSE)
        if state.waiting and not state.ours and not in_import(sys._current_frames().get(main)):
            state.ours = True
            signal.pthread_kill(main, signal.SIGINT)


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is Ctrl-C, or came while one waited, or from an import that one broke off."""
    pressed = state.waiting or state.broken
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, Exception) and pressed)


def tell() -> None:
    state.waiting = False
    print(LINE, file=sys.stderr)


def run_interruptible(program: Callable[[], None]) -> None:
    """Runs the program; Ctrl-C is exit code 1 and a line, wherever it comes."""
    watch()
    try:
        program()
    except SystemExit as end:
        if end.code != 130:  # what typer makes of Ctrl-C outside of a verb
            raise
    except BaseException as error:
        if not is_interrupt(error):
            raise
    else:
        return
    tell()
    sys.exit(1)
