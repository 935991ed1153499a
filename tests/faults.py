"""Faults for tests/mutation.py: a file of src/graft, its right text, a wrong one, and the tests that find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    file: str
    right: str  # once in the file
    wrong: str
    tests: tuple[str, ...]  # under tests/


def fault(file: str, right: str, wrong: str, *tests: str) -> Fault:
    return Fault(file, right, wrong, tests)


FAULTS = [
    # ── files, errors ───────────────────────────────────────────────────────────────────────────────────────────
    fault("files.py", "digest.update(chunk)", "digest.update(chunk[:1])", "unit/test_artifact_errors.py"),
    fault("files.py", "            old.rename(target)\n", "            pass\n", "unit/test_artifact_errors.py"),
    fault("errors.py", "cutoff=0.5", "cutoff=1.0", "unit/test_config.py"),
    # ── graph ───────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "graph/canonical.py",
        "return not mutated or not ({storage_root(node), storage_root(same)} & mutated)",
        "return True",
        "unit/test_canonical.py::test_what_is_written_to_is_not_shared",
        "unit/test_canonical.py::test_a_write_into_a_transposed_copy_is_not_seen_by_the_original",
    ),
    fault(
        "graph/canonical.py",
        "(type(value).__name__, repr(value)) if isinstance(value, (bool, int, float)) else value",
        "value",
        "unit/test_canonical.py::test_signed_zeros_are_not_merged",
    ),
    fault(
        "graph/match.py",
        "if wanted.target not in COMMUTATIVE or len(wanted.args) != 2:",
        "if wanted.target is not None:",
        "unit/test_match.py::test_matches_any_spelling_and_dtype",
    ),
    fault(
        "graph/match.py",
        "if self.literals.setdefault(wanted.name, found) != found:",
        "if self.literals.setdefault(wanted.name, found) is None:",
        "unit/test_match.py",
        "unit/test_must_not_fuse.py",
    ),
    fault(
        "graph/verify.py",
        'if "val" not in node.meta:',
        'if "val" not in node.meta and node.users is None:',
        "unit/test_pipeline.py::test_verify_passes_on_an_unchanged_graph_and_names_a_lost_value",
    ),
    # ── kvcache ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "kvcache/manager.py",
        "return self.refs[block] > 1 or self.entries[block] is not None",
        "return self.refs[block] > 1",
        "unit/test_block_manager.py",
    ),
    fault(
        "kvcache/manager.py",
        "range(0, len(tokens) - size, size)",
        "range(0, len(tokens) - size + 1, size)",
        "unit/test_block_manager.py",
    ),
    fault(
        "kvcache/hashing.py",
        "return self.parent is parent and self.tokens == tokens",
        "return self.parent is parent",
        "unit/test_block_manager.py",
    ),
    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "state/hazards.py",
        "(access.writes or other.writes) and not apart",
        "(access.writes and other.writes) and not apart",
        "unit/test_hazards.py",
    ),
    fault(
        "state/hazards.py",
        "return write.region is None or covers(write.region, other.region)",
        "return True",
        "unit/test_hazards.py",
    ),
    fault(
        "state/outputs.py",
        "if inputs and outputs.is_apart(place):",
        "if inputs and outputs.is_apart(place) is None:",
        "unit/test_functionalization.py",
    ),
    fault(
        "state/lifting.py",
        "return {binding.input: binding.tensor for binding in self.bindings}",
        "return {binding.input: binding.tensor.clone() for binding in self.bindings}",
        "unit/test_lifting.py",
    ),
    # ── capture ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "capture/fingerprint.py",
        "{tensor.stride()} {tensor.dtype} {tensor.device}",
        "{tensor.stride()} {tensor.device}",
        "unit/test_capture_cache.py",
    ),
    fault(
        "capture/cache.py",
        "if json.loads(head) != header(key, text):",
        'if json.loads(head).keys() != {"graft_graph", "sha256"}:',
        "unit/test_capture_cache.py",
    ),
    fault(
        "capture/attention.py",
        "    if dropout:\n",
        "    if dropout > 1:\n",
        "unit/test_capture.py::test_dropout_and_disagreeing_windows_are_errors",
    ),
    # ── artifact ────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "artifact/load.py",
        'if sha256(file) != recorded["sha256"]:',
        'if "sha256" not in recorded:',
        "unit/test_artifact_errors.py",
    ),
    fault(
        "artifact/save.py",
        "ready[name] = tensor.clone() if storage in seen else tensor",
        "ready[name] = tensor.clone().zero_() if storage in seen else tensor",
        "unit/test_artifact.py",
    ),
    # ── models ──────────────────────────────────────────────────────────────────────────────────────────────────
    fault("models/gguf_header.py", "if count > self.size - begin:", "if count < 0:", "unit/test_gguf_headers.py"),
    fault(
        "models/requests.py",
        'if (folder / "adapter_config.json").exists():',
        'if (folder / "adapter.json").exists():',
        "unit/test_model_requests.py",
    ),
    fault(
        "models/registry.py",
        "return {**dict.fromkeys(self.absent, 0), **counts}",
        "return {**counts, **dict.fromkeys(self.absent, 0)}",
        "unit/test_transforms.py::test_expected_counts_on_every_family_r9",
    ),
    # ── ops ─────────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "ops/rms_norm/reference.py",
        "(h * (scale + offset if offset else scale))",
        "(h * scale)",
        "unit/test_fuse_norms.py::test_rms_norm_fuses_to_the_same_bits_r11",
    ),
    fault("ops/rms_norm/triton.py", "axis=0) / d + eps)", "axis=0) / BLOCK + eps)", "unit/test_ops.py"),
    fault(
        "ops/rms_norm/native.h",
        "static_cast<float>(n) + eps)",
        "static_cast<float>(n))",
        "unit/test_native_kernels.py",
    ),
    fault(
        "ops/rope/reference.py",
        "torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1)",
        "torch.stack((x[..., 1::2], -x[..., 0::2]), dim=-1)",
        "unit/test_fuse_rope_spellings.py::test_spellings_fuse_bit_for_bit_r14",
    ),
    fault(
        "ops/moe_route/reference.py",
        "weights = weights / weights.sum(dim=-1, keepdim=True)",
        "weights = weights / weights.sum()",
        "unit/test_fuse_moe.py::test_grouped_experts_fuse_bit_for_bit_r19",
    ),
    fault(
        "ops/swiglu/reference.py",
        'F.gelu(x, approximate="tanh")',
        "F.gelu(x)",
        "unit/test_fuse_swiglu_spellings.py::test_gated_activation_fuses_to_the_same_bits_r13",
    ),
    # ── transforms ──────────────────────────────────────────────────────────────────────────────────────────────
    fault("transforms/proof.py", "if not error <= limit:", "if not error <= 50 * limit:", "unit/test_proof.py"),
    fault(
        "transforms/proof.py",
        "if was.target is not now.target or expected != [now.args, now.kwargs]:",
        "if was.target is not now.target:",
        "unit/test_proof.py",
    ),
    fault(
        "transforms/merge.py",
        "if len({node.args[0] for node in found}) > 1:",
        "if len({node.args[0] for node in found}) > 9:",
        "unit/test_transforms.py",
        "unit/test_merge_gemms.py",
        "unit/test_fuse_swiglu_spellings.py",
    ),
    fault(
        "transforms/merge.py",
        "shared = next((state for state in states if len(state.users) > 1), None)",
        "shared = next((state for state in states if len(state.users) > 9), None)",
        "unit/test_merge_gemms.py",
    ),
    fault(
        "transforms/pipeline.py", "earlier[second].add(first)", "earlier[first].add(second)", "unit/test_pipeline.py"
    ),
    fault(
        "transforms/library/insert_kv_cache.py",
        '(options[k] for k in ("scale", "window", "softcap", "sinks"))',
        '(options[k] if k != "window" else None for k in ("scale", "window", "softcap", "sinks"))',
        "unit/test_llm.py::test_greedy_tokens_equal_hugging_face_in_a_mixed_batch",
    ),
    fault(
        "transforms/library/update_state_in_place.py",
        "aten.index_add.default: aten.index_add_.default",
        "aten.index_add.default: aten.index_copy_.default",
        "unit/test_update_state_in_place.py",
    ),
    fault(
        "transforms/config.py",
        "if not prefix and key not in DEPTH:",
        "if not prefix and not key:",
        "unit/test_config.py",
    ),
    # ── backends ────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "backends/native/arena.py",
        "lives[other.name][0] <= last and first <= lives[other.name][1]",
        "lives[other.name][0] <= last and first < lives[other.name][1]",
        "unit/test_native_arena.py",
    ),
    fault(
        "backends/native/arena.py",
        "if clash(writes, [*read, *written]) or clash(reads, written):",
        "if clash(reads, written):",
        "unit/test_native_arena.py",
    ),
    fault(
        "backends/inductor.py",
        "if len(set(found)) == len(found) and state.isdisjoint(found):",
        "if state.isdisjoint(found):",
        "unit/test_inductor_backend.py",
    ),
    fault(
        "backends/replay.py",
        "kept = self.kept if reuse_outputs else copies(self.kept)",
        "kept = self.kept",
        "unit/test_replay.py",
    ),
    fault(
        "backends/float_inputs.py",
        "        return found.value in values\n",
        "        return True\n",
        "unit/test_float_inputs.py",
    ),
    # ── runtime ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault("runtime/scheduler.py", "        request.computed = 0\n", "", "unit/test_scheduler.py", "unit/test_llm.py"),
    fault(
        "runtime/scheduler.py",
        "self.running[-1].order <= request.order:",
        "self.running[-1].order < request.order:",
        "unit/test_scheduler.py",
    ),
    fault(
        "runtime/stops.py",
        "            matched = self.shorter[matched]\n",
        "            matched = 0\n",
        "unit/test_text.py",
    ),
    fault("runtime/penalties.py", "presence * (times > 0)", "presence * (times >= 0)", "unit/test_sampling.py"),
    fault(
        "runtime/sampling.py", "logprobs(logits[list(rows)]", "logprobs(edited[list(rows)]", "unit/test_sampling.py"
    ),
    # ── testing ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "testing/numbers.py",
        "return 2 * roundings * UNIT[dtype]",
        "return 2000 * roundings * UNIT[dtype]",
        "unit/test_testing_kit.py",
    ),
    # ── workbench ───────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "workbench/roofline.py", "return 2 * side**3 / seconds", "return side**3 / seconds", "unit/test_roofline.py"
    ),
    fault(
        "workbench/diff.py",
        "return {kind: found[kind] for kind in KINDS}",
        "return dict(found)",
        "unit/test_diff.py",
    ),
    fault(
        "workbench/quality.py",
        "divergence = float((theirs.exp() * (theirs - ours)).sum(-1).mean())",
        "divergence = float((ours.exp() * (theirs - ours)).sum(-1).mean())",
        "unit/test_quantization_numbers.py",
        "unit/test_benchmark_tools.py",
        "e2e/test_quantization.py",
    ),
    # ── cli ─────────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "cli/interrupts.py",
        'if frame.f_code.co_filename.startswith("<frozen importlib"):',
        'if frame.f_code.co_filename.startswith("<frozen nothing"):',
        "unit/test_interrupts.py",
    ),
]
