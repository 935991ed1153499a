"""From a command to the first token: new processes, with empty caches, full ones, and from a compiled engine.

Every process says what time it was when its first token was there, by the clock that all processes share; the parent
knows when it was started. The measure beside them is the time that importing torch and transformers takes: a busy
machine slows all of them alike, so that ratios hold where seconds do not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from graft.base.errors import GraftError
from graft.base.files import Progress

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "GRAFT_CACHE_DIR": "graft"}
OWN_CACHES = ("GRAFT_GRAPH_CACHE_DIR", "GRAFT_NATIVE_CACHE_DIR")  # that would take the place of those
PROMPT = "The capital of France is"
IMPORTS = "import torch, transformers, time; print(time.monotonic())"
HUGGING_FACE = """
import json, sys, time
import torch
from graft.models.load import load_model
asked = json.loads(sys.argv[1])
model = load_model(asked["model"], dtype=asked["dtype"], device=asked["device"])
ids = [1, 2, 3, 4, 5] if model.tokenizer is None else model.tokenizer(asked["prompt"])["input_ids"]
with torch.no_grad():
    logits = model.module(torch.tensor([ids], device=model.module.device)).logits
    token = int(logits[0, -1].argmax())
print(time.monotonic())
"""
GRAFT = """
import json, sys, time
began = time.monotonic()
asked = json.loads(sys.argv[1])
import graft
from graft.engine.llm import LLM
from graft.bench.phases import PhaseClock
imported, clock = time.monotonic() - began, PhaseClock()
clock.mark("configuration")
llm = LLM(asked["model"], dtype=asked["dtype"], device=asked["device"], quantize=asked["quantize"], progress=clock)
clock.mark("first token")
prompt = [1, 2, 3, 4, 5] if llm.tokenizer is None else asked["prompt"]
(output,) = llm.generate([prompt], graft.SamplingParams(max_tokens=1, ignore_eos=True))
now, phases = time.monotonic(), {"imports": imported, **clock.phases()}
if asked.get("save"):
    llm.save(asked["save"])
print(json.dumps({"phases": phases, "token": output.token_ids, "backend": llm.backend, "device": str(llm.device)}))
print(now)
"""


@dataclass(frozen=True)
class Start:
    """One kind of start: seconds to the first token of each repeat, and of its phases in the last."""

    kind: str
    seconds: tuple[float, ...]
    phases: Mapping[str, float]

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class StartTable:
    model: str
    starts: tuple[Start, ...]
    imports: float  # median of what importing torch and transformers took
    about: Mapping[str, Any]

    def to_data(self) -> dict[str, Any]:
        rows = {
            one.kind: {"seconds": one.seconds, "median": one.median, "of_imports": one.median / self.imports,
                       "phases": dict(one.phases)}
            for one in self.starts
        }  # fmt: skip
        return {"model": self.model, "imports_seconds": self.imports, "starts": rows, **self.about}


def measure_starts(
    model: str, *, dtype: str, device: str, quantize: str | None, repeats: int, progress: Progress | None = None
) -> StartTable:
    """Cold once, since it fills the caches; the others in turns."""
    tell = progress or (lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="graft-start-") as temporary:
        home = Path(temporary)
        environment = {name: value for name, value in os.environ.items() if name not in OWN_CACHES}
        environment |= {name: str(home / folder) for name, folder in CACHES.items()}
        asked = {"model": model, "dtype": dtype, "device": device, "quantize": quantize, "prompt": PROMPT}
        engine = home / "engine"
        tell("cold start", 0, 1)
        found = {"cold": [run(GRAFT, asked, environment)]}
        tell("compiling", 0, 1)
        run(GRAFT, asked | {"save": str(engine)}, environment)
        stored = {**asked, "model": str(engine), "dtype": "auto", "device": "auto", "quantize": None}
        kinds = {
            "imports": (IMPORTS, asked),
            "Hugging Face eager": (HUGGING_FACE, asked),
            "warm": (GRAFT, asked),
            "compiled engine": (GRAFT, stored),
        }
        for repeat in range(repeats):
            for kind, (program, what) in kinds.items():
                tell(f"{kind}, {repeat + 1} of {repeats}", repeat, repeats)
                found.setdefault(kind, []).append(run(program, what, environment))
    last = found["compiled engine"][-1][1]
    if last["token"] != found["warm"][-1][1]["token"]:
        raise GraftError(f"the compiled engine gives another token than {model} does; please report it")
    starts = {
        kind: Start(kind, tuple(s for s, _ in some), some[-1][1].get("phases", {})) for kind, some in found.items()
    }
    imports = starts.pop("imports")
    about = {"backend": last["backend"], "device": last["device"], "imports_each": imports.seconds}
    return StartTable(model, tuple(starts.values()), imports.median, about)


def run(program: str, asked: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of a process to what it says is its end, and what else it says."""
    began = time.monotonic()
    command = [sys.executable, "-c", program, json.dumps(asked)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise GraftError(f"a start of {asked['model']} failed: {said[-1]}")
    *before, end = done.stdout.splitlines()
    return float(end) - began, json.loads(before[-1]) if before else {}
