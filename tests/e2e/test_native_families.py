"""Tiny models of every family: a native step gives the eager engine's tokens."""

from __future__ import annotations

import shutil

import pytest

from conftest import FAMILIES, tiny
from graft import LLM, SamplingParams
from graft.backends.native.compiler import COMPILERS
from marks import short

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1] * 3, [11]]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
# latent attention pads and puts together what attention reads; the experts of gpt-oss have biases; Nemotron's norms
# have a weight that is computed, 1 + w
IN_PARTS = ("deepseek-v2", "deepseek-v3", "gpt-oss", "nemotron")


def tokens(llm: LLM) -> list[list[int]]:
    """Several at once, prompts in chunks; then again with a common beginning, which comes from the cache."""
    first = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    again = llm.generate([PROMPTS[1] + [3, 4], PROMPTS[1] + [4]], GREEDY)
    assert all(output.cached_tokens >= 16 for output in again)
    return first + [output.token_ids for output in again]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", short(FAMILIES, "gemma-2", "qwen3-moe", "deepseek-v3"))
def test_greedy_tokens_are_those_of_the_eager_engine(family):
    native, eager = (
        LLM(tiny(family), backend=name, max_num_batched_tokens=20, kv_cache_memory="8MiB")
        for name in ("native", "eager")
    )
    assert native.backend == "native"
    assert tokens(native) == tokens(eager)
    eagerly = [note for note in native.report.notes if "native: eager at" in note]
    assert bool(eagerly) == (family in IN_PARTS), eagerly
    if family not in IN_PARTS:
        assert any("in 1 regions" in note for note in native.report.notes), native.report.notes
        assert all(kernel.names == ("native",) for kernel in native.report.kernels.values())
