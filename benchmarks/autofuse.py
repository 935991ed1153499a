"""autofuse on a Llama of 16 layers whose fusions are off, then its package beside the hand-written library.

    python benchmarks/autofuse.py --device cpu --dtype float32 --budget 10m
    python benchmarks/autofuse.py --device cuda --dtype bfloat16 --hidden 2048 --budget 150s  # some 200 s of a GPU

The table is that of `graft autofuse`. Then step times in turns: without fusions, with what was kept, with the
library. `of the library`: the library's time over that of the package; 100 % is as fast. With -o the package is kept,
and the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graft.bench.bench import cache_need
from graft.bench.limits.machine import facts
from graft.bench.plan import BenchPlan
from graft.engine.llm import LLM
from graft.engine.setup.stages import load_decoder, settings_for
from graft.models.places import resolve_device
from graft.workbench.autofuse import AutofuseRequest, CandidateOutcome, autofuse, read_budget
from graft.workbench.autofuse.timing import alternate

OFF = tuple(
    f"transforms.{name}.enabled=false" for name in ("fuse_rms_norm", "fuse_add_rms_norm", "fuse_swiglu", "fuse_rope")
)


def write_model(folder: Path, layers: int, hidden: int) -> None:
    if (folder / "config.json").is_file():
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, max_position_embeddings=1024,
        initializer_range=0.05, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def engine(given: argparse.Namespace, model: Path, sets: tuple[str, ...], plugins: tuple[str, ...]) -> LLM:
    loaded = load_decoder(str(model), dtype=given.dtype, device=given.device, backend=given.backend)
    settings = settings_for(loaded, None, None, sets=sets, plugins=plugins)
    memory = cache_need(loaded, BenchPlan(batches=(2,), prompts=(given.prompt,), new=32))
    return LLM(loaded, config=settings, backend=given.backend, max_num_seqs=2, kv_cache_memory=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--budget", default="10m")
    parser.add_argument("-o", "--output", type=Path, help="keeps the package and the model here")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--save", type=Path, metavar="FILE", help="writes that document as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graft-autofuse-") as temporary:
        folder = given.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model, package = folder / "model", folder / "found-fusions"
        write_model(model, given.layers, given.hidden)
        started, processor = time.monotonic(), time.process_time()
        first: list[float] = []

        def tell(outcome: CandidateOutcome) -> None:
            if outcome.status == "kept" and not first:
                first.append(time.monotonic() - started)
            if not given.json:
                print(f"{outcome.status:9} {outcome.title} × {outcome.count}: {outcome.reason}", flush=True)

        request = AutofuseRequest(
            str(model), package, read_budget(given.budget), None, given.device, given.backend, given.dtype,
            sets=OFF, own=True, prompt=given.prompt,
        )  # fmt: skip
        ledger = autofuse(request, tell)
        spent = time.monotonic() - started
        sys.path.insert(0, str(package / "src"))
        plugins = ("found_fusions",) if ledger.kept else ()
        off, kept = engine(given, model, OFF, ()), engine(given, model, OFF, plugins)
        library = engine(given, model, (), ())
        rows: list[dict[str, Any]] = []
        for name, other in (("off", off), ("library", library)):
            for one in alternate(other, kept, given.prompt, 16, 9):
                rows.append({"beside": name, **one.to_dict()})
    document = {
        **facts(resolve_device(given.device)), "seconds": spent, "first_kept_seconds": first[0] if first else None,
        "own_cpu_seconds": time.process_time() - processor, "ledger": ledger.to_dict(), "rows": rows,
    }  # fmt: skip
    if given.save:
        given.save.write_text(json.dumps(document, indent=1) + "\n")
    if given.json:
        print(json.dumps(document))
        return
    told = f"{first[0]:.0f} s" if first else "never"
    print(f"{len(ledger.kept)} kept in {spent:.0f} s; the first after {told}; {document['device_name']}")
    for row in rows:
        share = statistics.median(b / a for b, a in zip(row["before"], row["after"], strict=True))
        text = f"{row['shape']:8} {row['beside']} {row['before_ms']:.3f} ms, package {row['after_ms']:.3f} ms"
        end = f"{share:.0%} of the library" if row["beside"] == "library" else f"{row['saving']:+.1%}"
        print(f"{text}: {end} ± {row['noise']:.1%}")


if __name__ == "__main__":
    main()
