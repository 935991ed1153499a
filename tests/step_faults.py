"""Faults of what a decode step on a GPU is made of: what goes into its linear layers, norms and attention."""

from __future__ import annotations

from fault import fault

STEPS = "unit/passes/library/matvec/test_linear_layers_of_a_step.py"
LINEAR = "unit/ops/test_fused_linear.py"
HEADS = "unit/ops/test_rope_attention.py"
FAMILIES = "unit/bench/test_families.py"

MATVEC = "passes/library/matvec"
ATTENTION = "ops/cached_attention"

STEP_FAULTS = [
    fault(f"{MATVEC}/fuse_residual_into_matvec.py", "residual=residual, alpha=alpha)", "residual=residual)", STEPS),
    fault(f"{MATVEC}/fuse_activation_into_matvec.py", "silu=lambda: F.silu(y)", "silu=lambda: F.sigmoid(y)", STEPS),
    fault("passes/library/fold_constants.py", "tensor_of(node).dim() > 1", "tensor_of(node).dim() > 2", STEPS),
    fault("passes/library/fuse_swiglu.py", "F.relu(x).pow(2)", "F.relu(x).pow(1)",
          "unit/passes/library/test_fuse_swiglu_spellings.py"),
    fault("ops/fused_linear/matvec.py", "h = (h - moments[0]) * moments[1]", "h = h * moments[1]", LINEAR),
    fault("ops/fused_linear/matvec.py", "y = y * alpha + tl.load(residual", "y = y + tl.load(residual", LINEAR),
    fault(f"{ATTENTION}/newest/triton.py", "own[5], dims, dims < d, d, TURN, TURN.NORM_K",
          "own[4], dims, dims < d, d, TURN, TURN.NORM_K", HEADS),
    fault(f"{ATTENTION}/newest/triton.py", "tl.rsqrt(square / d + eps)", "tl.rsqrt(square / TURN.R + eps)", HEADS),
    fault(f"{ATTENTION}/newest/triton.py", "pair = dims ^ 1", "pair = dims ^ 2", HEADS),
    fault(f"{ATTENTION}/newest/triton.py", "tl.where(dims < TURN.R, turned, x.to(dtype))", "turned", HEADS),
    fault(f"{ATTENTION}/decode_call.py", "rotation.cast_last and any(norms)", "False", HEADS),
    fault("ops/rms_norm/native.h", "(a.weight[i] + a.offset) + residual[i]", "(a.weight[i] + a.offset)",
          "unit/backends/test_native_kernels.py", "-k", "rms_norm"),
    fault("bench/family_turns.py", "BUILT in key.data.said", "key.data.said", FAMILIES),
    fault("bench/family_turns.py", "if not sys.stdin.readline():", "if False:", FAMILIES),
]  # fmt: skip
