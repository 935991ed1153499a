"""A tiny model that writes text."""

from __future__ import annotations

import copy
import json

from capture_cases import engine
from serve_cases import tokenizer_json


def llm_with_text(record):
    """The tiny model of 128 tokens with a tokenizer of single bytes: its random words become JSON by the grammar."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    spec = json.loads(tokenizer_json())
    kept = {token: at for token, at in spec["model"]["vocab"].items() if at < 128}
    spec["model"] |= {"vocab": kept, "merges": []}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<|im_end|>")
    llm = copy.copy(engine("llama", record))
    llm.engine.tokenizer, llm.engine.end_tokens = tokenizer, frozenset({2})
    return llm
