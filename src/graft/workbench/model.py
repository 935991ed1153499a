"""A model captured for inspection: without weights where they would be random anyway."""

from __future__ import annotations

from torch.fx import GraphModule

from graft.base.files import Progress
from graft.capture.cache import captured_decoder
from graft.models.load import load_model
from graft.models.loaded import LoadedModel
from graft.models.registry import entries


def captured(
    name: str,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    weights: bool = False,
    in_blocks: bool = False,
    trust_remote_code: bool = False,
) -> tuple[LoadedModel, GraphModule]:
    """weights: random ones too. in_blocks: those of a GGUF file stay in its blocks. trust_remote_code: Python code
    that a folder brings may run."""
    entry = entries().get(name)
    device = "meta" if entry is not None and entry.kind == "random" and not weights else "cpu"
    model = load_model(
        name, dtype=dtype, device=device, progress=progress, in_blocks=in_blocks, trust_remote_code=trust_remote_code
    )
    return model, captured_decoder(model.module, progress)[0]
