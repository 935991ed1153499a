"""Shapes of a dumped graph, from the text that it keeps of them: `bf16[s44, s70, 32]@meta`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule

from graft.ir.io.symbols import Symbol, declare, evaluate, fresh_mode
from graft.ir.io.text import SHORT_DTYPES

DTYPES = {text: dtype for dtype, text in SHORT_DTYPES.items()}
TENSOR = re.compile(r"([\w.]+)\[(.*)\](?:@([\w:]+))?")
EXAMPLES = (2, 3, 5, 7, 11, 13, 17, 19)  # sizes are told apart where values are made up


def restore_values(gm: GraphModule) -> None:
    """Gives every node without an abstract value the one that its text describes; strides are taken as dense."""
    texts = {n: str(text) for n in gm.graph.nodes if "val" not in n.meta and (text := n.meta.get("value_text"))}
    names = sorted({name for text in texts.values() for name in re.findall(r"\b[suz]\d+\b", text)})
    mode = fresh_mode()
    hints = (EXAMPLES[index % len(EXAMPLES)] for index in range(len(names)))
    symbols = declare([Symbol(name, hint, 2, None) for name, hint in zip(names, hints, strict=True)], mode)
    made: dict[str, Any] = {}
    with mode, torch.no_grad():
        for node, text in texts.items():
            if text not in made:
                made[text] = read_value(text, symbols)
            node.meta["val"] = made[text]


def read_value(text: str, symbols: dict[str, Any]) -> Any:
    """A tensor, a size, or a tuple of them; None for what is neither."""
    if text.startswith("(") and text.endswith(")") and "[" in text:
        return tuple(read_value(part, symbols) for part in split(text[1:-1]))
    found = TENSOR.fullmatch(text)
    if found is None:
        known = all(name in symbols for name in re.findall(r"\b[a-z]\w*", text))
        return evaluate(text, symbols) if known and text not in ("None", "") and "." not in text else None
    dtype = DTYPES.get(found[1]) or getattr(torch, found[1].removeprefix("torch."))
    sizes = [evaluate(size, symbols) for size in split(found[2])]
    device = "cpu" if found[3] in (None, "cpu") else "meta"  # a GPU need not be here
    return torch.empty(sizes, dtype=dtype, device=device)


def split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [part for part in (*parts, text[start:].strip()) if part]
