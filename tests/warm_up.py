"""What every process of a run does for the first time, done once, in the one that they are forked from.

The first engine of a process traces the patterns of all transforms, and torch imports and fills tables of its own
for the first capture and the first compiled function: three seconds that each of the other workers would take again.
"""

from __future__ import annotations

from importlib.util import find_spec


def warm_up() -> None:
    import torch
    import typer.main

    import graft
    from graft.cli.app import app

    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager", use_cache=False)
    llm.generate([[1, 2, 3]], graft.SamplingParams(max_tokens=2))
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    torch.compiler.reset()
    typer.main.get_command(app)
    if find_spec("triton"):
        from triton.runtime.cache import triton_key

        triton_key()  # all of Triton's files are read for it: a second, which Inductor's first key takes
