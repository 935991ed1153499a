"""Which stream the calls of a graph run on, as calls of their own.

    graft::stream_switch(stream)    the calls below it run on this stream; 0 is the caller's
    graft::stream_record(event)     marks how far the stream has come
    graft::stream_wait(event)       the stream goes on when the mark is reached
    graft::stream_keep(tensors)     their memory stays theirs up to here; nothing is read

The ops do nothing. A graph that is run as it stands runs on one stream, in its order, which is always right; so it
does on a CPU, under a tracer and in a numeric check. The eager and the CUDA graph backend give them their meaning
(backends/streams.py). They return nothing, so cleanups keep them (`ir/canonical/normal_form.py: is_effect`), and a
dump stores them like any op.
"""

from __future__ import annotations

import torch

from graft.ops.spec import LIBRARY

SCHEMAS = {
    "stream_switch": "(int stream) -> ()",
    "stream_record": "(int event) -> ()",
    "stream_wait": "(int event) -> ()",
    "stream_keep": "(Tensor[] tensors) -> ()",
}


def nothing(_: object) -> None:
    """What each of them does by itself."""


for name, schema in SCHEMAS.items():
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, nothing, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graft::{name}", nothing, lib=LIBRARY)

SWITCH = torch.ops.graft.stream_switch.default
RECORD = torch.ops.graft.stream_record.default
WAIT = torch.ops.graft.stream_wait.default
KEEP = torch.ops.graft.stream_keep.default
