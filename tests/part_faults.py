"""Faults in loads and parts: garbage and kernels ahead of a load, parts of one tensor, parts of ranks."""

from __future__ import annotations

from fault import fault

PART_FAULTS = [
    fault(
        "base/garbage.py",
        "gc.get_freeze_count() < FROM_THE_START",
        "gc.get_freeze_count() == 0",
        "unit/base/test_garbage.py::test_what_is_old_waits_and_what_is_new_is_collected",
    ),
    fault(
        "base/garbage.py",
        "gc.set_threshold(young, middle, RARELY)",
        "gc.set_threshold(young, middle, old)",
        "unit/base/test_garbage.py::test_full_collections_are_rare_while_an_engine_works",
    ),
    fault(
        "ops/cached_attention/prefill/triton.py",
        "(start == row) & (stop == row + 1) & (length > 1)",
        "(start == row) & (stop == row + 1)",
        "unit/ops/test_cached_attention.py::test_who_decodes_in_a_step_on_fixed_memory_is_counted_on_the_device",
    ),
    fault(
        "ops/fused_linear/kinds.py",
        '"int4": 129,',
        '"int4": 1029,',
        "unit/ops/test_choice.py::test_weights_are_widened_at_once_for_many_tokens",
    ),
    fault(
        "ops/launch.py",
        "first + -(-count // ALIGNED) * ALIGNED",
        "first + count",
        "unit/ops/test_counters.py::test_every_call_has_its_own_at_an_aligned_address",
    ),
    fault(
        "ops/cached_attention/triton.py",
        "short = min(room, EVEN_CONTEXT)",
        "short = room",
        "unit/ops/test_attention_programs.py::test_every_kernel_that_takes_sequences_beside_prompts_runs_before_the_first_request",
    ),
    fault(
        "weights/lazy.py",
        "part.read(whole_box(shape), tensor.data.as_strided(",
        "part.read(whole_box(shape), tensor.detach().as_strided(",
        "unit/weights/test_gguf_blocks.py::test_rows_behind_parameters",
    ),
    # ── parts of one tensor, and parts of ranks ─────────────────────────────────────────────────────────────────
    fault(
        "passes/library/join_copies.py",
        "        if start > end:\n",
        "        if start > end + 1:\n",
        "unit/passes/library/test_join_copies.py::test_what_is_something_else_is_left_alone_and_told",
    ),
    fault(
        "passes/library/join_copies.py",
        "if user < last and not filled(user)",
        "if user > last and not filled(user)",
        "unit/passes/library/test_join_copies.py",
    ),
    fault(
        "ir/evaluate.py",
        "reached((*self.outputs, *self.writes), reads)",
        "reached(self.outputs, reads)",
        "unit/passes/library/test_join_copies.py::test_parts_become_one_cat",
    ),
    fault(
        "passes/library/shard/experts.py",
        "3 - axis if transposed else axis",
        "axis",
        "unit/passes/library/test_shard_tensor_parallel.py::test_the_ranks_together_give_what_one_gives",
    ),
    fault(
        "passes/library/shard/regions.py",
        "norms=attends or is_inner_norm(x)",
        "norms=attends",
        "unit/passes/library/test_shard_tensor_parallel.py::test_the_ranks_together_give_what_one_gives",
    ),
    fault(
        "ops/all_reduce_add_norm/op.py",
        "torch.ops.graft.add_rms_norm(all_reduce(x, world), residual",
        "torch.ops.graft.add_rms_norm(x, residual",
        "unit/ops/test_rank_ops.py::test_a_sum_that_is_normed_is_the_groups_own",
    ),
    fault(
        "ops/all_reduce_add_norm/triton.py",
        "epoch += 1",
        "epoch += row % 2",
        "unit/ops/test_peers.py::test_every_rank_gets_the_sum_of_all_parts",
    ),
    fault(
        "engine/ranks/follow.py",
        "engine.states.beside(slots[0].to(device))",
        "engine.states.inputs(range(len(slots[0])))",
        "unit/engine/test_rank_steps.py",
    ),
    # ── latent attention ────────────────────────────────────────────────────────────────────────────────────────
    fault(
        "passes/library/attention/absorb_latent_attention.py",
        "start == 0 and end == start_v and",
        "start == 0 and",
        "unit/passes/library/attention/test_absorb_latent_attention.py",
    ),
    fault(
        "ops/latent_attention/reference.py",
        "[:, sizes.nope :]",
        "[:, : sizes.value]",
        "unit/ops/test_latent_attention.py::test_absorbed_and_expanded_are_the_same_and_need_all_of_the_row",
    ),
    fault(
        "engine/setup/stages.py",
        "latent=any(layer.tensors == 1 for layer in layers)",
        "latent=False",
        "unit/engine/test_latent_cache.py::test_one_row_a_token_is_kept_and_counted",
    ),
    fault(
        "ops/paged_latent_attention/native_absorbed.h",
        "total += by[part] * from[a.rank + 1];",
        "total += from[a.rank + 1];",
        "unit/backends/test_native_attention.py",
    ),
    fault(
        "passes/numeric/compare.py",
        "& torch.isinf(nearest) & (nearest == after)",
        "& torch.isinf(after)",
        "unit/passes/test_numeric_bounds.py::test_an_infinity_is_right_where_the_exact_number_is_beyond_the_dtype_and_nowhere_else",
    ),
]
