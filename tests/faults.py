"""Faults for tests/mutation.py: a file of src/graft, its right text, a wrong one, and the tests that find it."""

from __future__ import annotations

from capture_faults import CAPTURE_FAULTS
from fault import fault
from joint_faults import JOINT_FAULTS
from part_faults import PART_FAULTS
from request_faults import REQUEST_FAULTS
from state_faults import STATE_FAULTS
from step_faults import STEP_FAULTS

FAULTS = [
    # ── files, errors ───────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "base/manifest.py",
        "digest.update(chunk)",
        "digest.update(chunk[:1])",
        "unit/api/test_artifact_errors.py::test_one_changed_byte_is_an_error_that_names_the_file",
    ),
    fault(
        "base/files.py",
        "target.write_bytes(content)",
        "target.unlink()",
        "unit/workbench/test_new_transform.py::test_a_failure_on_the_way_leaves_all_as_it_was",
    ),
    fault(
        "base/files.py",
        "            old.rename(target)\n",
        "            pass\n",
        "unit/api/test_artifact_errors.py::test_a_folder_that_cannot_take_its_place_leaves_the_old_one",
    ),
    fault("base/errors/base.py", "cutoff=0.5", "cutoff=1.0", "unit/passes/test_config.py"),
    # ── graph ───────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "ir/canonical/normal_form.py",
        "return not mutated or not ({storage_root(node), storage_root(same)} & mutated)",
        "return True",
        "unit/ir/test_canonical.py::test_what_is_written_to_is_not_shared",
        "unit/ir/test_canonical.py::test_a_write_into_a_transposed_copy_is_not_seen_by_the_original",
    ),
    fault(
        "ir/canonical/normal_form.py",
        "(type(value).__name__, repr(value)) if isinstance(value, (bool, int, float)) else value",
        "value",
        "unit/ir/test_canonical.py::test_signed_zeros_are_not_merged",
    ),
    fault(
        "ir/patterns/attempt.py",
        "if wanted.target not in COMMUTATIVE or len(wanted.args) != 2:",
        "if wanted.target is not None:",
        "unit/ir/test_match.py::test_matches_any_spelling_and_dtype",
    ),
    fault(
        "ir/verify.py",
        'if "val" not in node.meta and not',
        'if "val" not in node.meta and node.users is None and not',
        "unit/passes/test_pipeline.py::test_verify_passes_on_an_unchanged_graph_and_names_a_lost_value",
    ),
    fault("ir/program/frames.py", 'name == "forward" or', 'name == "call" or', "unit/ir/test_frames.py"),
    # ── engine ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "engine/kv/manager.py",
        "return self.refs[block] > 1 or self.entries[block] is not None",
        "return self.refs[block] > 1",
        "unit/engine/test_block_manager.py",
    ),
    fault(
        "engine/kv/manager.py",
        "range(0, len(tokens) - size, size)",
        "range(0, len(tokens) - size + 1, size)",
        "unit/engine/test_block_manager.py",
    ),
    fault(
        "engine/kv/hashing.py",
        "return self.parent is parent and self.tokens == tokens",
        "return self.parent is parent",
        "unit/engine/test_block_manager.py",
    ),
    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "memory/hazards.py",
        "(access.writes or other.writes) and not apart",
        "(access.writes and other.writes) and not apart",
        "unit/memory/test_hazards.py",
    ),
    fault(
        "memory/hazards.py",
        "return write.region is None or covers(write.region, other.region)",
        "return True",
        "unit/memory/test_hazards.py",
    ),
    fault(
        "memory/inductor_fix/outputs.py",
        "if inputs and outputs.is_apart(position):",
        "if inputs and outputs.is_apart(position) is None:",
        "unit/memory/test_functionalization.py::test_traps_with_the_copies_they_need",
    ),
    fault(
        "memory/lifting.py",
        "return {binding.input: binding.tensor for binding in self.bindings}",
        "return {binding.input: binding.tensor.clone() for binding in self.bindings}",
        "unit/memory/test_lifting.py::test_an_exported_program",
    ),
    *CAPTURE_FAULTS,
    # ── artifact ────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "base/manifest.py",
        'if [check.result() for check in self.checks[name]] != self.manifest["files"][name]["sha256"]:',
        'if len(self.checks[name]) != len(self.manifest["files"][name]["sha256"]):',
        "unit/api/test_artifact_errors.py::test_one_changed_byte_is_an_error_that_names_the_file",
    ),
    fault(
        "api/artifact/save.py",
        '{f"initial/{name}": values_of(tensor)',
        '{f"initial/{name}": values_of(tensor) + 1',
        "unit/api/test_artifact.py::test_reset_brings_the_initial_values_back_after_loading",
    ),
    # ── models ──────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "weights/gguf/header.py",
        "if count > self.size - begin:",
        "if count < 0:",
        "unit/weights/test_gguf_headers.py::test_the_header_alone_is_read_or_refused",
    ),
    fault(
        "models/requests.py",
        'if (folder / "adapter_config.json").exists():',
        'if (folder / "adapter.json").exists():',
        "unit/models/test_model_requests.py::test_an_adapter_in_the_folder_is_refused_with_and_without_peft",
    ),
    fault(
        "models/registry.py",
        "return {**dict.fromkeys(self.absent, 0), **counts}",
        "return {**counts, **dict.fromkeys(self.absent, 0)}",
        "unit/engine/test_decode_families.py::test_counts_and_greedy_tokens[llama]",
    ),
    # ── ops ─────────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "ops/rms_norm/reference.py",
        "(h * (scale + offset if offset else scale))",
        "(h * scale)",
        "unit/passes/library/norms/test_fuse_norms.py::test_rms_norm_fuses_to_the_same_bits",
    ),
    fault(
        "ops/rms_norm/triton.py",
        "axis=0) / d + eps)",
        "axis=0) / BLOCK + eps)",
        "unit/ops/test_ops.py",
        "-k",
        "triton_agrees and rms_norm",
    ),
    fault(
        "ops/rms_norm/native.h",
        "static_cast<float>(n) + eps)",
        "static_cast<float>(n))",
        "unit/backends/test_native_kernels.py::test_kernels_agree_with_float64_and_a_wrong_one_does_not[rms_norm]",
    ),
    fault(
        "ops/rope/reference.py",
        "torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1)",
        "torch.stack((x[..., 1::2], -x[..., 0::2]), dim=-1)",
        "unit/passes/library/rope/test_fuse_rope_spellings.py::test_spellings_fuse_bit_for_bit",
    ),
    fault(
        "ops/moe_route/reference.py",
        "total = weights.sum(dim=-1, keepdim=True)",
        "total = weights.sum()",
        "unit/passes/library/moe/test_fuse_moe.py::test_grouped_experts_fuse_bit_for_bit",
    ),
    fault(
        "ops/swiglu/reference.py",
        'F.gelu(x, approximate="tanh")',
        "F.gelu(x)",
        "unit/passes/library/test_fuse_swiglu_spellings.py::test_gated_activation_fuses_to_the_same_bits",
    ),
    # ── transforms ──────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "passes/numeric/compare.py",
        "return not self.error <= self.limit and",
        "return not self.error <= 50 * self.limit and",
        "unit/passes/test_numeric_check.py::test_wrong_replacements_are_caught_and_taken_back",
    ),
    fault(
        "passes/accounting.py",
        "if node.target is not target or changed is None:\n        return True",
        "if node.target is not target or changed is None:\n        return True\n    return False",
        "unit/passes/test_numeric_check.py::test_changes_that_no_match_accounts_for_are_refused",
    ),
    fault(
        "passes/library/merge/linears.py",
        "if len({node.args[0] for node in found}) > 1:",
        "if len({node.args[0] for node in found}) > 9:",
        "unit/passes/library/test_fuse_swiglu_spellings.py::test_merging_of_query_key_and_value_is_refused",
    ),
    fault(
        "passes/library/merge/linears.py",
        "shared = next((state for state in states if len(state.users) > 1), None)",
        "shared = next((state for state in states if len(state.users) > 9), None)",
        "unit/passes/library/merge/test_merge_gemms.py::test_what_must_stay_stays_byte_for_byte_with_the_reason",
    ),
    fault(
        "passes/pipeline.py",
        "earlier[second].add(first)",
        "earlier[first].add(second)",
        "unit/passes/test_pipeline.py::test_order_is_by_stage_then_constraints_then_listing",
    ),
    fault(
        "passes/library/insert_kv_cache.py",
        "k, v, k_cache, v_cache, *layout, scale, window, softcap, sinks)",
        "k, v, k_cache, v_cache, *layout, scale, None, softcap, sinks)",
        "unit/engine/test_llm.py::test_greedy_tokens_equal_hugging_face_in_a_mixed_batch[gemma-2]",
    ),
    fault(
        "passes/library/update_state_in_place.py",
        "aten.index_add.default: aten.index_add_.default",
        "aten.index_add.default: aten.index_copy_.default",
        "unit/passes/library/test_update_state_in_place.py::test_every_form_writes_in_place",
    ),
    fault(
        "passes/config.py",
        "layers += [parse_set(text) for text in sets]",
        "layers[1:1] = [parse_set(text) for text in sets]",
        "unit/passes/test_config.py::test_layers_lie_over_each_other_in_order",
    ),
    # ── backends ────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "backends/native/arena.py",
        "lives[other.name][0] <= last and first <= lives[other.name][1]",
        "lives[other.name][0] <= last and first < lives[other.name][1]",
        "unit/backends/test_native_arena.py",
    ),
    fault(
        "backends/native/arena.py",
        "if clash(writes, [*read, *written]) or clash(reads, written):",
        "if clash(reads, written):",
        "unit/backends/test_native_arena.py",
    ),
    fault(
        "backends/inductor.py",
        "if len(set(found)) == len(found) and state.isdisjoint(found):",
        "if state.isdisjoint(found):",
        "unit/backends/test_inductor_backend.py",
    ),
    fault(
        "backends/replay.py",
        "kept = self.kept if reuse_outputs else copies(self.kept)",
        "kept = self.kept",
        "unit/backends/test_replay.py::test_replays_equal_eager",
    ),
    fault(
        "backends/float_inputs.py",
        "        return found.value in values\n",
        "        return True\n",
        "unit/api/test_float_inputs.py::test_a_module_s_number_is_a_constant_until_it_keeps_changing",
    ),
    # ── runtime ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault("engine/scheduler.py", "        request.computed = 0\n", "", "unit/engine/test_scheduler.py"),
    fault(
        "engine/scheduler.py",
        "self.running[-1].order <= request.order:",
        "self.running[-1].order < request.order:",
        "unit/engine/test_scheduler.py",
    ),
    fault(
        "engine/text/stops.py",
        "            matched = self.shorter[matched]\n",
        "            matched = 0\n",
        "unit/engine/test_text.py::test_pieces_are_the_text_up_to_the_first_stop_string",
    ),
    fault(
        "engine/sampling/penalties.py",
        "presence * (times > 0)",
        "presence * (times >= 0)",
        "unit/engine/test_sampling.py::test_penalties_give_the_exact_probabilities",
    ),
    fault(
        "engine/sampling/sampling.py",
        "logprobs(logits[list(rows)]",
        "logprobs(edited[list(rows)]",
        "unit/engine/test_sampling.py::test_log_probabilities_tell_penalised_from_raw",
    ),
    # ── testing ─────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "testing/numbers.py",
        "return 2 * roundings * UNIT[dtype]",
        "return 2000 * roundings * UNIT[dtype]",
        "unit/testing/test_testing_kit.py::test_a_comparison_that_lets_a_wrong_variant_pass_fails",
        "unit/testing/test_testing_kit.py::test_other_numbers_are_told_with_their_place",
    ),
    # ── workbench ───────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "bench/limits/roofline.py",
        "return 2 * side**3 / seconds",
        "return side**3 / seconds",
        "unit/bench/test_roofline.py::test_rates_are_bytes_and_operations_over_seconds",
    ),
    # ── cli ─────────────────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "cli/interrupts.py",
        'if frame.f_code.co_filename.startswith("<frozen importlib"):',
        'if frame.f_code.co_filename.startswith("<frozen nothing"):',
        "unit/cli/test_interrupts.py::test_an_import_ends_before_the_interrupt_comes",
    ),
    # ── where the short run has fewer cases than the long one ──────────────────────────────────────────────────
    fault(  # one case of a kernel in 16 bits
        "backends/native/program.py",
        'torch.float16: "f16"',
        'torch.float16: "bf16"',
        "unit/backends/test_native_kernels.py::test_kernels_agree_with_float64_and_a_wrong_one_does_not[rms_norm]",
    ),
    fault(  # one instruction set for products, all for what they are made of
        "ops/native/vec_avx2.h",
        "_mm256_permute4x64_epi64(both, 0xd8)",
        "_mm256_permute4x64_epi64(both, 0xe4)",
        "unit/backends/test_native_vec.py",
    ),
    fault(  # formats × dtypes
        "weights/quantize.py",
        "clamp_(-FP8_TOP, FP8_TOP)",
        "clamp_(-FP8_TOP, FP8_TOP / 2)",
        "unit/weights/test_quantization_numbers.py",
    ),
    fault(  # parameters × wrong values
        "engine/params.py",
        "if value is not None and not allowed(value):",
        "if value and not allowed(value):",
        "unit/engine/test_params.py",
    ),
    fault(  # kinds of masks × sizes
        "passes/library/attention/masks.py",
        "            return is_causal, window\n",
        "            return is_causal, None\n",
        "unit/passes/library/attention/test_fuse_attention_positions.py",
    ),
    fault(  # one family with windows
        "ops/cached_attention/reference.py",
        "keys[:, :, -window:], values[:, :, -window:]",
        "keys[:, :, -window - 1 :], values[:, :, -window - 1 :]",
        "unit/engine/test_llm.py::test_any_batch_gives_each_request_its_own_tokens",
    ),
    fault(  # files × what is wrong with them
        "base/manifest.py",
        "if found != size:",
        "if found < size:",
        "unit/api/test_artifact_errors.py",
    ),
    fault(  # a third of the programs that a batch takes in, and all that are refused
        "ir/program/layouts.py",
        "if str(layout(tensor)) != str(before):",
        "if str(layout(tensor)[:1]) != str(before[:1]):",
        "peers/test_peer_programs.py",
        "-k",
        "eager and layouts",
    ),
    fault(  # a process that is forked from one without graft
        "api/artifact/load.py",
        'if key.startswith("current/")}',
        'if key.startswith("initial/")}',
        "unit/api/test_artifact.py::test_a_new_process_goes_on_from_the_saved_state",
    ),
    fault(  # of a folder that is replaced while it is read
        "api/artifact/load.py",
        "load_file(folder.checked_path(WEIGHTS))",
        "load_file(folder.path / WEIGHTS)",
        "unit/api/test_artifact_errors.py::test_a_module_that_is_replaced_while_it_is_read_is_one_or_the_other",
    ),
    fault(  # a block to spare for each request
        "engine/forecast.py",
        "return self.manager.blocks_for(request.most_tokens) * (1 + to_come(request))",
        "return (1 + self.manager.blocks_for(request.most_tokens)) * (1 + to_come(request))",
        "unit/engine/test_forecast.py::test_those_that_fill_the_cache_run_at_once",
    ),
    fault(  # StaticCache of one family
        "capture/static_cache.py",
        'result = put(result, path.split(".")[1:], caches[number])',
        "put(None, [], caches[number])",
        "unit/capture/test_static_cache.py",
    ),
    # ── server, workbench ──────────────────────────────────────────────────────────────────────────────────────
    fault("serve/keys.py", 'b"bearer" and self.known(key)', 'b"bearer"', "unit/serve/test_parts.py"),
    fault("serve/wire.py", "if len(body) < size:", "if len(body) > size:", "unit/serve/test_parts.py"),
    fault("deploy/policy.py", "<= idlest + policy.slack", "<= idlest + 99", "unit/deploy/test_policy.py"),
    fault("engine/forecast.py", "+ count * remaining)", "+ remaining)", "unit/engine/test_forecast.py"),
    fault("workbench/diff.py", "if old == new:", "if True:", "unit/workbench/test_diff.py"),
    fault("stages/caches.py", "lookups(again) if again", "lookups(trace) if again", "unit/stages/test_story.py"),
    fault(
        "dist/sizes.py", "heads % world == 0 and (", "heads % world == 0 or (", "unit/engine/test_tensor_parallel.py"
    ),
    fault("mcp/workspace.py", "self.root not in path.parents", "False", "unit/mcp/test_mcp.py"),
    *JOINT_FAULTS,
    *PART_FAULTS,
    *REQUEST_FAULTS,
    *STATE_FAULTS,
    *STEP_FAULTS,
]
