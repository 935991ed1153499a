"""What the native backend does to the predictions of a model, a row for each format of its weights.

    python benchmarks/native_quality.py --model smollm2-135m --formats file int8 int4 none

The reference is Hugging Face's module in float64 over the weights of the GGUF file, dequantised. `logits`: how far
the native logits are from it, relative to its norm. `own`: the same from the eager backend in float32 over the very
weights that the format has, which is what the kernels alone lose, rows of x in 8 bits included. Perplexity, KL
divergence and agreement are over the text that ships with graft.
"""

from __future__ import annotations

import argparse

import torch

from graft import LLM
from graft.backends import lower
from graft.bench.evaluate import shipped_text
from graft.bench.quality import engine_logits, logits_error, quality
from graft.models.load import load_model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a registry name or a .gguf file")
    parser.add_argument("--formats", nargs="+", default=["file", "int8", "int4", "none"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    model = load_model(given.model, device="cpu", in_blocks=True)
    if model.floats is None:
        parser.error(f"{given.model} is not a GGUF file")
    ids = model.tokenizer(shipped_text())["input_ids"][: given.tokens]
    exact = model.floats().double()(torch.tensor([ids])).logits[0]
    print(
        f"{given.model}, {given.dtype}, {len(ids)} tokens; float64: perplexity {quality(exact, ids).perplexity:.4f}"
    )
    print(f"{'format':8}{'logits':>10}{'own':>10}{'perplexity':>12}{'KL':>10}{'agreement':>11}")
    for kind in given.formats:
        llm = LLM(
            given.model, dtype=given.dtype, device="cpu", backend="native", kv_cache_memory="64MiB",
            quantize=None if kind == "file" else kind,
        )  # fmt: skip
        found = engine_logits(llm, ids)
        own = logits_error(found, engine_logits(llm, ids, lower(llm.graph_module, "eager").call))
        q = quality(found.double(), ids, exact)
        error = logits_error(found, exact)
        print(f"{kind:8}{error:10.2e}{own:10.2e}{q.perplexity:12.4f}{q.divergence:10.5f}{q.agreement:11.1%}")


if __name__ == "__main__":
    main()
