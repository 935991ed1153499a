"""Real clients against a real server with the embedded model, each group in an environment of its own.

    python tests/clients/run_all.py FOLDER [NAME …]     # FOLDER: for the environments, which stay there

The exit status is the number of clients that failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "cases"), str(HERE.parent)]

from serve_cases import serving  # noqa: E402

MODEL = "smollm2-135m"
NPM = "openai@6.49.0"
# what they need, pinned: environment, packages
PINS = {
    "openai": ("clients", ["openai==3.49.0"]),
    "anthropic": ("clients", ["anthropic==2.10.0"]),
    "langchain": ("clients", ["langchain-openai==1.7.3"]),
    "llm": ("clients", ["llm==0.36"]),
    "litellm": ("inst", ["litellm==1.106.2"]),
    "instructor": ("inst", ["instructor==1.17.0"]),
    "lm_eval": ("evals", ["lm-eval[api]==0.4.13", "transformers"]),
}


def environment(folder: Path, name: str) -> Path:
    """The Python in which a client is installed."""
    home, packages = folder / PINS[name][0], PINS[name][1]
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return python


def node_modules(folder: Path) -> Path:
    home = folder / "node"
    if not (home / "node_modules" / "openai").exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(home), NPM], check=True)
    return home


def save_tokenizer(folder: Path) -> str:
    """lm-eval cuts prompts into tokens itself."""
    from graft.engine.setup.stages import load_decoder

    target = folder / "tokenizer"
    load_decoder(MODEL).tokenizer.save_pretrained(target)
    return str(target)


def command(name: str, folder: Path, base: str) -> list[str]:
    if name == "node":
        return ["node", str(HERE / "with_openai.mjs"), base, MODEL, str(node_modules(folder))]
    more = [save_tokenizer(folder)] if name == "lm_eval" else []
    return [str(environment(folder, name)), str(HERE / f"with_{name}.py"), base, MODEL, *more]


def main(folder: str, *names: str) -> int:
    wanted = names or (*PINS, *(["node"] if shutil.which("node") else []))
    failed = 0
    options = ("--tool-call-parser", "smollm", "--max-num-seqs", 8, "--kv-cache-memory", "256MiB")
    with open(os.devnull, "w") as nowhere, serving(MODEL, *options, stub=False, errors=nowhere) as server:
        for name in wanted:
            line = command(name, Path(folder).resolve(), f"{server.url}/v1")
            began = time.monotonic()
            done = subprocess.run(line, capture_output=True, text=True)
            failed += bool(done.returncode)
            told = done.stderr[-2000:] if done.returncode else ""
            print(
                f"{name:12} {'failed' if done.returncode else 'fine'} {time.monotonic() - began:6.1f} s {told}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
