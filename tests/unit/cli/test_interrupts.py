"""Ctrl-C is one line and exit code 1, also where it falls into an import that makes something else of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from typer import Exit

from graft.cli import interrupts
from graft.cli.app import guarded

CTRL_C = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
IMPORTS = {
    "it goes on": CTRL_C,
    "another error": CTRL_C + "raise RuntimeError('CPU dispatcher tracer already initialized')\n",
    "pressed again": CTRL_C * 2,
    "and swallowed": f"try:\n    import signal\n    {CTRL_C.splitlines()[1]}\n    {CTRL_C.splitlines()[1]}\n"
    "except BaseException:\n    raise ImportError('partially initialized module') from None\n",
}


def graft(tmp_path, module: str, code: str, *args: str):
    """The program in its own process, where `module` is this code."""
    (tmp_path / f"{module}.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    return subprocess.run(
        [sys.executable, "-m", "graft", *args], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", IMPORTS)
@pytest.mark.parametrize("module", ["typer", "torch"])  # before the verbs are there, and inside of one
def test_while_something_is_imported(tmp_path, module, kind):
    result = graft(tmp_path, module, IMPORTS[kind], "run", "-m", "tiny-llama", "--token-ids", "1")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", interrupts.LINE + "\n")


def test_an_error_without_ctrl_c_keeps_its_traceback(tmp_path):
    result = graft(tmp_path, "torch", "raise RuntimeError('broken package')", "run", "x", "-m", "tiny-llama")
    assert result.returncode == 1 and "broken package" in result.stderr and "Traceback" in result.stderr


def test_between_the_verbs_and_inside_of_one(monkeypatch, capsys):
    def verb():
        raise KeyboardInterrupt

    with pytest.raises(Exit):
        guarded(verb)()
    assert capsys.readouterr().err == interrupts.LINE + "\n"
    with pytest.raises(SystemExit) as end:
        interrupts.run_interruptible(lambda: sys.exit(130))
    assert end.value.code == 1 and capsys.readouterr().err == interrupts.LINE + "\n"
    with pytest.raises(SystemExit) as end:
        interrupts.run_interruptible(lambda: sys.exit(2))
    assert end.value.code == 2 and capsys.readouterr().err == ""


def test_a_later_error_is_not_taken_for_the_interrupt(monkeypatch):
    """Ctrl-C that stops an answer, outside of imports, leaves nothing in mind."""
    monkeypatch.setattr(interrupts, "state", interrupts.fresh())
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interrupts.is_interrupt(RuntimeError("a defect"))


def test_an_import_ends_before_the_interrupt_comes(tmp_path, monkeypatch):
    """Raised inside, it would leave the module half made, or be lost in its code."""
    (tmp_path / "slow_module.py").write_text(CTRL_C + "done = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "state", interrupts.fresh())
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            import slow_module  # pyrefly: ignore

            while interrupts.state.waiting:
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGINT, before)
    assert slow_module.done and not interrupts.state.broken
