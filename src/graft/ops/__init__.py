"""graft's operators. Importing this package registers all of them with torch as `torch.ops.graft.*`."""

from graft.ops.add_rms_norm import op as _add_rms_norm
from graft.ops.attention import op as _attention
from graft.ops.paged_attention import op as _paged_attention
from graft.ops.rms_norm import op as _rms_norm
from graft.ops.rope import op as _rope
from graft.ops.spec import OPS, Kernel, OpSpec, choose
from graft.ops.swiglu import op as _swiglu

__all__ = ["OPS", "Kernel", "OpSpec", "choose"]
