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
rank<r>/…                of an engine on several ranks: those of the above that are not alike on all of them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.base.errors import ArtifactError
from graft.base.manifest import MANIFEST, FolderKind, OpenFolder, is_marked

ENGINE = FolderKind(
    "graft engine", 3, "a compiled engine", "`graft compile MODEL -o DIR` writes one", "compile the model again"
)
GRAPH, REPORT, CONFIG, WEIGHTS = "graph.json", "report.json", "config.json", "weights.safetensors"
TOKENIZER, KERNELS, TUNED, REFERENCES = "tokenizer", "kernels", "tuned.json", "references.json"
OBJECT, SOURCE, STEP = "native/step.so", "native/step.cpp", "native/step.json"


def is_engine(model: object) -> bool:
    """Whether a model's name is the folder of a compiled engine."""
    return isinstance(model, (str, Path)) and (Path(model) / MANIFEST).is_file() and is_marked(Path(model), ENGINE)


def rank_folder(rank: int) -> str:
    return f"rank{rank}"


class EngineFolder(OpenFolder):
    """The folder as one rank sees it: its own files, and those that all have alike. rank: None, of an engine that is
    not split. All files are opened, so that none is missing; those of other ranks are theirs to check."""

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(path, ENGINE)

    def open_all(self) -> dict[str, Any]:
        manifest = super().open_all()
        if self.rank is None:
            return manifest
        parts = ranks_in(self.path, manifest)
        if self.rank >= len(parts):
            raise ArtifactError(self.path, f"has parts of {len(parts)} ranks, and none of rank {self.rank}")
        return manifest | parts[self.rank]

    def whole_name(self, name: str) -> str:
        own = name if self.rank is None else f"{rank_folder(self.rank)}/{name}"
        return own if own in self.descriptors else name

    def is_needed(self, name: str) -> bool:
        first, slash, _ = name.partition("/")
        others = (rank_folder(rank) for rank in range(len(self.manifest.get("ranks", ()))) if rank != self.rank)
        return not slash or first not in others

    def names(self, folder: str) -> list[str]:
        own = () if self.rank is None else super().names(f"{rank_folder(self.rank)}/{folder}")
        return sorted({*super().names(folder), *(name.partition("/")[2] for name in own)})


def ranks_in(path: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What the manifest says of each rank; nothing for an engine that is not split."""
    found = manifest.get("ranks", [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ArtifactError(path / MANIFEST, "has ranks that cannot be read; it is damaged")
    return found


def ranks_of(path: Path) -> int:
    """How many ranks a compiled engine is for. All its files are there, those of all ranks."""
    opened = EngineFolder(path)
    opened.close()
    return len(ranks_in(path, opened.manifest)) or 1
