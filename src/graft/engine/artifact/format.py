"""The folder of a compiled engine.

manifest.json            what it was compiled for, the model, size and sha256 of every other file
graph.json               the transformed graph; on the native backend for reading alone
report.json              what the pipeline did
config.json              the model's configuration, all values
tokenizer/               as transformers saves it, the chat template included; words.json: what a server asks of it
native/step.so, .cpp     the compiled step, and the C++ that it was made of
native/step.json         how its regions are called
kernels/<key>/…          Triton's compiled kernels and launchers, by its own keys
tuned.json               the measured choices that were used
references.json          which weights are bytes of the checkpoint, and where they lie in it
weights.safetensors      the others, as kernels read them; mapped, or streamed to a GPU
"""

from __future__ import annotations

from pathlib import Path

from graft.base.manifest import MANIFEST, FolderKind, is_marked

ENGINE = FolderKind(
    "graft engine", 3, "a compiled engine", "`graft compile MODEL -o DIR` writes one", "compile the model again"
)
GRAPH, REPORT, CONFIG, WEIGHTS = "graph.json", "report.json", "config.json", "weights.safetensors"
TOKENIZER, KERNELS, TUNED, REFERENCES = "tokenizer", "kernels", "tuned.json", "references.json"
OBJECT, SOURCE, STEP = "native/step.so", "native/step.cpp", "native/step.json"


def is_engine(model: object) -> bool:
    """Whether a model's name is the folder of a compiled engine."""
    return isinstance(model, (str, Path)) and (Path(model) / MANIFEST).is_file() and is_marked(Path(model), ENGINE)
