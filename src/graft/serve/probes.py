"""From a loaded LLM to what the HTTP process has to know, its tokenizer included."""

from __future__ import annotations

from typing import Any

from graft.base.errors import TokenizerRefused
from graft.engine.llm import LLM
from graft.serve.wire import ServedModel

PROBES = ("Hello, world!", " two  spaces\n\tand lines", "naïve café – 你好 🙂", "def f(x):\n    return x[0] != 'a'")


def served_model(llm: LLM) -> ServedModel:
    tokenizer, manager, pooling = llm.tokenizer, llm.engine.manager, llm.engine.pooling
    return ServedModel(
        name=llm.model.name,
        context=llm.model.context,
        vocabulary=llm.model.module.config.vocab_size,
        cache_tokens=manager.blocks * manager.block_size,
        max_num_seqs=llm.engine.scheduler.max_num_seqs,
        tokenizer=None if tokenizer is None else as_json(llm.model.name, tokenizer),
        chat_template=None if tokenizer is None else template_of(tokenizer),
        special_tokens={} if tokenizer is None else {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        probes=() if tokenizer is None else [probe(llm, text) for text in PROBES],
        end_tokens=sorted(llm.engine.end_tokens),
        runner="generate" if pooling is None else "pooling",
        matryoshka=() if pooling is None else pooling.matryoshka,
        width=0 if pooling is None else head_width(llm),
    )


def head_width(llm: LLM) -> int:
    """Of what the output projection, which is left out, would read."""
    head: Any = llm.model.module.get_output_embeddings()
    return int(head.weight.shape[-1])


def as_json(model: str, tokenizer: Any) -> str:
    """What tokenizer.json would hold."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise TokenizerRefused(model, f"a {type(tokenizer).__name__} has no form in the `tokenizers` library")
    return backend.to_str()


def template_of(tokenizer: Any) -> str | None:
    found = tokenizer.chat_template
    return found.get("default") if isinstance(found, dict) else found


def probe(llm: LLM, text: str) -> tuple[str, list[int], str]:
    ids = llm.encode(text)
    return text, ids, llm.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
