"""An engine for tests of threads: its steps can be held at a gate, its tokens are written as numbers."""

from __future__ import annotations

import random
import threading
from functools import cache

import graft
from conftest import resized, tiny

GREEDY = graft.SamplingParams(max_tokens=12, ignore_eos=True)
LONG = graft.SamplingParams(max_tokens=200, ignore_eos=True)
PATIENCE = 60  # seconds until a thread that should have ended counts as hanging


class Numbers:
    """A tokenizer that writes tokens as numbers."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(f"<{t}>" for t in tokens)


@cache
def captured() -> graft.LLM:
    return graft.LLM(tiny("llama"), backend="eager")


def engine(**options) -> graft.LLM:
    llm = resized(captured(), **options)
    llm.engine.tokenizer = Numbers()
    return llm


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def empty(llm) -> bool:
    """Whether all that was asked for has ended and every block is free. What was put before is done before."""
    with llm.held() as engine:
        engine.manager.check()
        return engine.idle and engine.manager.available == engine.manager.blocks


class Gate:
    """Lets the engine's steps through one by one, or all; says when one has come."""

    def __init__(self, llm):
        self.came, self.may = threading.Semaphore(0), threading.Semaphore(0)
        self.opened, self.run = False, llm.engine.graph
        llm.engine.graph = self

    def __call__(self, *inputs):
        if not self.opened:
            self.came.release()
            self.may.acquire()
        return self.run(*inputs)

    def open(self):
        self.opened = True
        self.may.release()
