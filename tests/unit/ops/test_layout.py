"""The inputs of the engine's graph: named, ordered, declared, built and checked in one place."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
import graft.ops
from capture_cases import engine
from conftest import graph_of, tiny
from graft.base.errors import LayoutError
from graft.ir.edit import Editor
from graft.ir.nodes import placeholders
from graft.ops.layout import INPUTS, NAMES, PAGED, Batch, HostBatch, check_graph, pack
from graft.ops.layout_check import check
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from marks import examples

BLOCK, CPU = 4, torch.device("cpu")


def decoder():
    gm = graph_of(tiny("llama").module)
    run_pipeline(gm, load_config(None), Context(route="decoder", backend="eager"), model="tiny-llama")
    return gm


def shape(gm, name):
    return next(list(node.meta["val"].shape) for node in placeholders(gm.graph) if node.name == name)


def test_every_size_has_a_symbol_of_its_own():
    gm = decoder()
    (_, tokens), (seqs, table_blocks) = shape(gm, "input_ids"), shape(gm, "block_tables")
    (logits,), cache_blocks = shape(gm, "logits_indices"), shape(gm, "k_cache_0")[0]
    assert len({str(size) for size in (tokens, seqs, table_blocks, logits, cache_blocks)}) == 5
    assert str(shape(gm, "cu_seqlens")) == str([seqs + 1])
    for name, sizes in (("slot_mapping", [tokens]), ("seq_lens", [seqs]), ("lens_cpu", [seqs, 2])):
        assert str(shape(gm, name)) == str(sizes)
    assert str(shape(gm, "v_cache_1")[0]) == str(cache_blocks)


def test_one_order_for_the_graph_the_batch_and_the_lists():
    gm = decoder()
    check_graph(gm.graph)
    assert [node.name for node in placeholders(gm.graph)][: len(NAMES)] == list(NAMES)
    assert tuple(f.name for f in fields(HostBatch)) == tuple(f.name for f in fields(Batch)) == NAMES
    assert [one.name for one in INPUTS if one.on_host] == ["lens_cpu"]
    Editor(gm, "test").placeholder("mask", torch.zeros(1))
    with pytest.raises(LayoutError, match="no transform may add inputs"):
        check_graph(gm.graph)


@pytest.mark.parametrize("op", ["paged_attention", "cached_attention", "rope_attention", "rope_kv_write"])
def test_ops_call_them_by_the_same_names(op):
    names = [argument.name for argument in getattr(torch.ops.graft, op).default._schema.arguments]
    taken = [name for name in names if name in PAGED]
    wanted = {"paged_attention": PAGED, "rope_attention": PAGED, "cached_attention": PAGED[1:]}
    assert tuple(taken) == wanted.get(op, PAGED[:1])


@st.composite
def hosts(draw):
    """Sequences that decode, prompts and chunks of prompts, with blocks that lie scattered; how many there are."""
    old = draw(st.lists(st.integers(0, 11), min_size=1, max_size=4))
    new = [draw(st.integers(1, 9)) for _ in old]
    needed = [-(-(o + n) // BLOCK) for o, n in zip(old, new, strict=True)]
    blocks = draw(st.permutations(range(sum(needed) + 1)))
    host = HostBatch()
    for o, n in zip(old, new, strict=True):
        mine, blocks = blocks[: -(-(o + n) // BLOCK)], blocks[-(-(o + n) // BLOCK) :]
        host.add(list(range(n)), o, mine, BLOCK)
    return host, sum(needed) + 1


@given(hosts())
@settings(max_examples=examples(60))
def test_what_is_packed_is_well_formed(made):
    host, blocks = made
    batch = pack(host, CPU)
    check(batch, BLOCK, blocks)
    assert batch.inputs() == tuple(getattr(batch, name) for name in NAMES)
    tokens, seqs = len(host.input_ids) + 3, len(host.seq_lens) + 3
    padded = pack(host.padded(tokens, seqs, [2, 1], blocks, BLOCK), CPU)
    check(padded, BLOCK, blocks + 1, padding=blocks)
    assert padded.input_ids.shape == (1, tokens) and padded.seq_lens.shape == (seqs,)
    with pytest.raises(LayoutError, match=r"position_ids|slot_mapping|block_tables"):
        check(padded, BLOCK, blocks + 1)  # the padding is taken for a sequence


@given(hosts(), st.sampled_from(NAMES[1:]), st.integers(0, 100), st.sampled_from([1, -1, 50]))
@settings(max_examples=examples(120))
def test_one_wrong_number_is_found(made, name, at, by):
    host, blocks = made
    batch = pack(host, CPU)
    wrong = getattr(batch, name).clone()
    flat, at = wrong.view(-1), at % wrong.numel()
    flat[at] += by
    if name == "logits_indices" and 0 <= flat[at] < len(host.input_ids):
        return  # the logits of another token may be wanted
    if name == "block_tables" and 0 <= flat[at] < blocks:
        seq, block = divmod(at, wrong.shape[1])
        count, length = host.lens_cpu[seq]
        if not length - count < (block + 1) * BLOCK <= length + BLOCK - 1:
            return  # a block without a token that is fed: it may be any that was written before
    with pytest.raises(LayoutError):
        check(replace(batch, **{name: wrong}), BLOCK, blocks)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_and_dtypes_are_found(name):
    host = HostBatch()
    host.add([1, 2, 3], 0, [0], BLOCK)
    host.add([4], 5, [1, 2], BLOCK)
    batch = pack(host, CPU)
    check(batch, BLOCK, 3)
    tensor = getattr(batch, name)
    for other in (tensor.int(), tensor[None], torch.cat((tensor, tensor), dim=-1)):
        if name == "logits_indices" and other.shape == (4,):
            continue  # so many logits may be wanted
        if name == "block_tables" and other.shape == (2, 4):
            continue  # wider tables than needed
        with pytest.raises(LayoutError, match=name if name != "input_ids" else "is"):
            check(replace(batch, **{name: other}), BLOCK, 3)


@pytest.mark.parametrize("record", [True, False])
def test_every_batch_of_an_engine_is_well_formed(record):
    """Prompts in chunks, decode steps and mixtures, packed, padded and in the fixed memory of recorded steps."""
    llm = engine("llama", record, max_num_seqs=4, max_num_batched_tokens=24)
    running, loop = llm.engine, llm.engine.loop
    graph, seen, size = running.graph, [], running.manager.block_size
    blocks = running.tensors[0].shape[0]

    def checked(*inputs):
        batch = Batch(*inputs[: len(NAMES)])
        check(batch, size, blocks, padding=running.manager.blocks if record else None)
        seen.append(tuple(batch.input_ids.shape[1:] + batch.seq_lens.shape))
        return graph(*inputs)

    owners = [running, *([loop.captures, loop.packed] if loop is not None else [])]
    for owner in owners:
        owner.graph = checked
    try:
        prompts = [[i * 7 % 120 + 1 for i in range(count)] for count in (1, 3, 16, 17, 40)]
        params = [graft.SamplingParams(max_tokens=4 + i, ignore_eos=True) for i in range(len(prompts))]
        llm.generate(prompts, params)
    finally:
        for owner in owners:
            owner.graph = graph
    assert any(tokens == seqs for tokens, seqs in seen) and any(tokens > seqs for tokens, seqs in seen)
