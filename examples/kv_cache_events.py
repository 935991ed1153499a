"""Two prompts that share a prefix, and what that does to the key-value cache: the events of the real manager.

python examples/kv_cache_events.py [--model smollm2-135m]
"""

from __future__ import annotations

import argparse

import graft
from graft.engine.kv.view import CacheView

SHARED, NEW = 40, 6  # tokens; a block has 16, so two whole blocks are shared


def show(llm: graft.LLM, view: CacheView) -> None:
    for event in llm.kv_cache_events():
        view.apply(event)
        print(f"  {event.event_id:3} {type(event).__name__.lower():8} {event.describe()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    llm = graft.LLM(parser.parse_args().model, kv_cache_memory="16MiB", max_num_seqs=2)
    view, params = CacheView(), graft.SamplingParams(max_tokens=NEW, ignore_eos=True)

    print("the cache is made:")
    show(llm, view)
    prefix = [3 + i % 97 for i in range(SHARED)]
    for name, tail in (("first", [5, 6, 7]), ("second", [8, 9])):
        (output,) = llm.generate([prefix + tail], params)
        print(f"the {name} prompt, {len(prefix + tail)} tokens, {output.cached_tokens} of them from the cache:")
        show(llm, view)
    assert output.cached_tokens == SHARED // 16 * 16, "the second prompt found the whole blocks that the first left"

    print("many others, until the memory is full:")
    llm.generate([[t] * 200 for t in range(3, 40)], graft.SamplingParams(max_tokens=1))
    counts: dict[str, int] = {}
    for event in llm.kv_cache_events():
        view.apply(event)
        counts[type(event).__name__.lower()] = counts.get(type(event).__name__.lower(), 0) + 1
    print("  " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    stored = set(llm.engine.manager.stored)
    assert set(view.blocks) == stored
    print(f"a reader of the events alone knows all {len(stored)} stored blocks")


if __name__ == "__main__":
    main()
