"""Decode speed against plain Hugging Face eager, both measured in this run: medians of alternating repeats.

python benchmarks/decode.py --model smollm2-135m --dtype float32 --batch 1 8
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

import graft
from graft.bench.baselines.hf import hugging_face_rate
from graft.cli.show import quiet_libraries
from graft.models.load import load_model


def measure(llm: graft.LLM, prompt: list[int], new: int, batch: int, repeats: int) -> dict[str, float | int]:
    params = graft.SamplingParams(max_tokens=new, ignore_eos=True)
    ours, theirs = [], []
    llm.generate([prompt] * batch, graft.SamplingParams(max_tokens=3, ignore_eos=True))
    for _ in range(repeats):
        llm.generate([prompt] * batch, params)
        ours.append(llm.stats.decode_rate)
        theirs.append(hugging_face_rate(llm.model, prompt, new, batch))
    rate, baseline = statistics.median(ours), statistics.median(theirs)
    weights = sum(p.numel() * p.element_size() for p in llm.graph_module.parameters())
    return {
        "batch": batch,
        "graft_tokens_per_s": round(rate, 2),
        "hugging_face_tokens_per_s": round(baseline, 2),
        "ratio": round(rate / baseline, 3),
        "graft_GB_per_s": round(weights * rate / batch / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    quiet_libraries()
    llm = graft.LLM(load_model(args.model, dtype=args.dtype, device=args.device))
    vocabulary = llm.model.module.config.vocab_size
    prompt = [(7 * i + 100) % vocabulary for i in range(args.prompt)]
    rows = []
    for batch in args.batch:
        rows.append(measure(llm, prompt, args.new, batch, args.repeats))
        r = rows[-1]
        ours = f"graft {r['graft_tokens_per_s']} tok/s ({r['graft_GB_per_s']} GB/s of weights)"
        theirs = f"Hugging Face eager {r['hugging_face_tokens_per_s']} tok/s"
        print(f"{args.model} {args.dtype} batch {batch}: {ours}, {theirs}, ratio {r['ratio']}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    setup = {**vars(args), "torch": torch.__version__, "threads": torch.get_num_threads(), "device_name": device}
    print(json.dumps({"setup": setup, "rows": rows}))


if __name__ == "__main__":
    main()
