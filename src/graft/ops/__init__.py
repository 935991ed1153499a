"""graft's operators. Importing this package registers all of them with torch as `torch.ops.graft.*`."""

from graft.ops.add_rms_norm.op import SPEC as ADD_RMS_NORM
from graft.ops.attention.op import SPEC as ATTENTION
from graft.ops.layer_norm.op import SPEC as LAYER_NORM
from graft.ops.paged_attention.op import SPEC as PAGED_ATTENTION
from graft.ops.rms_norm.op import SPEC as RMS_NORM
from graft.ops.rope.op import SPEC as ROPE
from graft.ops.spec import OPS, Kernel, OpSpec, choose
from graft.ops.swiglu.op import SPEC as SWIGLU

__all__ = [
    "ADD_RMS_NORM",
    "ATTENTION",
    "LAYER_NORM",
    "OPS",
    "PAGED_ATTENTION",
    "RMS_NORM",
    "ROPE",
    "SWIGLU",
    "Kernel",
    "OpSpec",
    "choose",
]
