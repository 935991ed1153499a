"""The Inductor backend: the transformed graph through torch.compile, for any size of its dynamic dims."""

from __future__ import annotations

import os

import torch
from torch.fx import GraphModule

from graft.backends.select import Lowered


def lower_inductor(gm: GraphModule) -> Lowered:
    # Inductor tries out each instruction set in a subprocess, up to 20 s; the sets it names are trusted instead
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    compiled = torch.compile(gm, dynamic=True)
    note = "inductor: compiled at the first call; graft ops run as custom ops inside it"
    return Lowered(compiled, "inductor", {}, (note,))
