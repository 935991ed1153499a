"""Captured graphs on disk: a second start of an equal model reads its graph instead of running torch.export.

    <cache directory>/graphs/<fingerprint>.json     a line with the fingerprint and a checksum, then the graph

The file holds no weights: they are the model's own. A model that cannot be told from another (hooks, code without a
version, see fingerprint.py) is captured each time, and the note says why. GRAFT_NO_GRAPH_CACHE=1 turns it off,
GRAFT_GRAPH_CACHE_DIR names another folder for these files.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from torch.fx import GraphModule
from transformers import PreTrainedModel

from graft.base.caches import GRAPHS, note_use
from graft.base.errors import DumpError
from graft.base.files import Progress, atomic_file
from graft.base.progress import CAPTURE, Doing
from graft.capture.code import Unknowable
from graft.capture.decoder import CLASS_NAME, capture_decoder
from graft.capture.fingerprint import fingerprint
from graft.capture.layers_once import capture_layers_once
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.verify import module_state

OFF = "GRAFT_NO_GRAPH_CACHE"


def captured_decoder(model: PreTrainedModel, progress: Progress | None = None) -> tuple[GraphModule, str]:
    """What `capture_decoder` gives, from the cache where it is there, and a note on how it came."""
    started = time.perf_counter()
    key, why = cache_key(model)
    file = None if key is None else GRAPHS.folder() / f"{key}.json"
    if key is not None and file is not None and file.exists():
        if progress:
            progress(Doing("loading the captured graph", CAPTURE), 0, 1)
        found = load(file, key, model)
        if isinstance(found, GraphModule):
            note_use(file)
            seconds = time.perf_counter() - started
            return found, f"captured graph: from the cache ({key[:12]}), {seconds:.1f} s"
        why = f"; the stored graph was not used: {found}"
    if progress:
        progress(Doing("capturing the graph", CAPTURE), 0, 1)
    started = time.perf_counter()
    gm, how = capture_layers_once(model) if key else (capture_decoder(model), "")
    seconds = time.perf_counter() - started
    stored = "not stored" if key is None or file is None else store(file, key, gm, model)
    if key is not None and file is not None and stored == "stored":
        again = load(file, key, model)  # what later starts get, so that the first builds the same bytes
        gm = again if isinstance(again, GraphModule) else gm
    return gm, f"captured graph: captured in {seconds:.1f} s{how and f' ({how})'}, {stored}{why}"


def cache_key(model: PreTrainedModel) -> tuple[str | None, str]:
    """The fingerprint; or None, and why there is none."""
    if os.environ.get(OFF, "") not in ("", "0"):
        return None, f" ({OFF} is set)"
    try:
        return fingerprint(model), ""
    except (Unknowable, RecursionError) as error:
        return None, f" ({error})"


def load(file: Path, key: str, model: PreTrainedModel) -> GraphModule | str:
    """The graph around the model's own tensors, or what is wrong with the file."""
    try:
        head, _, text = file.read_text().partition("\n")
        if not header(key, text).items() <= json.loads(head).items():
            return "its checksum is not what it says"
        state = module_state(model)
        gm = graph_from_json(text, state)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DumpError) as error:
        return f"{type(error).__name__}: {error}"
    foreign = [name for name, tensor in module_state(gm).items() if state.get(name) is not tensor]
    if foreign:
        return f"{foreign[0]} is not the model's"
    type(gm).__name__ = CLASS_NAME  # a GraphModule's class is its own
    return gm


def store(file: Path, key: str, gm: GraphModule, model: PreTrainedModel) -> str:
    """Writes the file whole or not at all; "stored", or why not."""
    known = module_state(model)
    foreign = [name for name, tensor in module_state(gm).items() if known.get(name) is not tensor]
    if foreign:
        return f"not stored: {foreign[0]} is neither a parameter nor a buffer of the model"
    try:
        text = graph_to_json(gm, exact=True)
        with atomic_file(file) as partial:
            partial.write_text(f"{json.dumps(header(key, text) | {'about': about(model)})}\n{text}")
    except (OSError, DumpError) as error:
        return f"not stored: {error}"
    note_use(file)
    return "stored"


def about(model: PreTrainedModel) -> str:
    """For those who look at the cache."""
    layers = getattr(model.config, "num_hidden_layers", "?")
    return f"{type(model).__name__}, {layers} layers, {str(model.dtype).removeprefix('torch.')}, {model.device}"


def header(key: str, text: str) -> dict[str, str]:
    return {"graft_graph": key, "sha256": hashlib.sha256(text.encode()).hexdigest()}
