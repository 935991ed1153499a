"""What processes of ranks do beside computing: programs that they start, and what captures or rewrites graphs."""

from __future__ import annotations

from pathlib import Path

SITE = """
import os, sys
BEGUN = ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "os.fork", "os.forkpty")
HEAVY = ("graft.capture.decoder", "graft.passes.pipeline")

def hook(event, given):
    if event in BEGUN or (event == "import" and given[0] in HEAVY):
        with open(os.path.join(os.environ["EVENTS"], str(os.getpid())), "a") as file:
            file.write(f"{given[0] if event == 'import' else event}\\n")

sys.addaudithook(hook)
"""
BUILDING = "graft.passes.pipeline"  # which whoever captures needs, and a compiled engine does not


def watch(home: Path) -> dict[str, str]:
    """For the environment. Every Python that starts with `home` on its path takes note of what it does."""
    (home / "events").mkdir(parents=True)
    (home / "sitecustomize.py").write_text(SITE)
    return {"EVENTS": str(home / "events")}


def events(home: Path) -> list[list[str]]:
    """Of each process that did something, what it did."""
    return [file.read_text().split() for file in sorted((home / "events").iterdir())]
