"""How a decoder makes one vector of a text: as the files of sentence-transformers in its folder say.

modules.json lists the steps; the folder of its Pooling step has a config.json that says which tokens count. A folder
without them, or a GGUF file, has what decoders that embed are trained for: the last token, at length 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graft.base.errors import CheckpointError
from graft.models.loaded import LoadedModel
from graft.weights.checkpoint import read_json, read_object

MODULES, PROMPTS, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
MODES: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}
PREFIX, SUFFIX = "pooling_mode_", "_tokens"  # of the older form: pooling_mode_lasttoken, pooling_mode_mean_tokens


@dataclass(frozen=True)
class Pooling:
    """tokens: `last`, the vector of the last token, or `mean`, the mean of all. normalize: its length is made 1.
    matryoshka: dimensions that it may be cut to; () none, None any. longest: tokens of a text, if the folder limits
    them. source: where this stands. notes: what of the folder is left to the caller."""

    tokens: Literal["last", "mean"]
    normalize: bool
    matryoshka: tuple[int, ...] | None
    longest: int | None
    source: str
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """For the report."""
        what = "the last token's hidden state" if self.tokens == "last" else "the mean of all hidden states"
        return f"pooling: {what}{', normalised' if self.normalize else ''} ({self.source})"


def pooling_of(model: LoadedModel) -> Pooling:
    cut = matryoshka(model.module.config)
    folder = model.folder
    if folder is None or not (folder / MODULES).is_file():
        return Pooling("last", True, cut, None, f"by default: there is no {MODULES}")
    pooled: Literal["last", "mean"] | None = None
    normalize = False
    for kind, place in steps(folder):
        if kind == "Pooling":
            pooled = mode(folder / place / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{folder / MODULES}: the step {kind} is not supported (Transformer, Pooling and Normalize are);"
                " embed with sentence-transformers, or with a checkpoint that has no such step"
            )
    if pooled is None:
        raise CheckpointError(f"{folder / MODULES} has no Pooling step, so that it gives a vector for each token")
    return Pooling(pooled, normalize, cut, longest(folder), f"by {MODULES}", tuple(prompt_notes(folder)))


def steps(folder: Path) -> list[tuple[str, str]]:
    """(class, folder) of each: `sentence_transformers.models.Pooling` is Pooling."""
    read = read_json(folder / MODULES)
    if not isinstance(read, list) or not all(isinstance(one, Mapping) and "type" in one for one in read):
        raise CheckpointError(f"{folder / MODULES} must be a list of steps, each an object with its type")
    made = [(str(one["type"]).rpartition(".")[2], str(one.get("path") or "")) for one in read]
    for _, place in made:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise CheckpointError(f"{folder / MODULES}: the path {place!r} leads out of the folder")
    return made


def mode(file: Path) -> Literal["last", "mean"]:
    """Of a Pooling step: the newer `pooling_mode`, or the older flags, of which one is true."""
    read = read_object(file)
    named = read.get("pooling_mode")
    found = [named] if isinstance(named, str) else named if isinstance(named, list) else flags(read)
    if len(found) != 1 or found[0] not in MODES:
        asked = ", ".join(map(str, found)) or "nothing"
        raise CheckpointError(f"{file}: pooling by {asked} is not supported ({', '.join(MODES)} are, one of them)")
    if read.get("include_prompt") is False:
        raise CheckpointError(f"{file}: include_prompt false leaves tokens of a prompt out, which is not supported")
    return MODES[found[0]]


def flags(read: Mapping[str, Any]) -> Sequence[str]:
    names = [name for name, value in read.items() if name.startswith(PREFIX) and value is True]
    return [name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in names]


def longest(folder: Path) -> int | None:
    """sentence-transformers cuts texts there; graft refuses them."""
    file = folder / TRANSFORMER
    read = read_object(file) if file.is_file() else {}
    if read.get("do_lower_case"):
        raise CheckpointError(f"{file}: do_lower_case is not supported; write texts in lower case, and take it out")
    most = read.get("max_seq_length")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise CheckpointError(f"{file}: max_seq_length is {most!r}, but it is a whole number of at least 1")
    return most


def prompt_notes(folder: Path) -> list[str]:
    file = folder / PROMPTS
    read = read_object(file) if file.is_file() else {}
    prompts = read.get("prompts")
    used = [name for name, text in prompts.items() if text] if isinstance(prompts, Mapping) else []
    if not used:
        return []
    return [f"{PROMPTS}: the prompts {', '.join(used)} are not put before texts; whoever asks writes them"]


def matryoshka(config: Any) -> tuple[int, ...] | None:
    """As config.json says: `matryoshka_dimensions`, or `is_matryoshka`, which allows any; vLLM reads the same."""
    given = getattr(config, "matryoshka_dimensions", None)
    if given is not None:
        if not isinstance(given, list) or not all(type(one) is int and one > 0 for one in given):
            raise CheckpointError(f"config.json: matryoshka_dimensions must be whole numbers, but is {given!r}")
        return tuple(given)
    return None if getattr(config, "is_matryoshka", False) is True else ()
