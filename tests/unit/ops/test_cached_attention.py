"""graft::cached_attention and graft::rope_kv_write: every kernel against float64, with everything poisoned that must
not be read. Without a GPU the Triton kernels run in Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.ops import OPS, choose, launch
from graft.ops.cached_attention import op as choice
from graft.ops.cached_attention import triton as dispatch
from graft.ops.cached_attention.balanced.triton import balanced, first_of, owner_of
from graft.ops.cached_attention.decode import triton as decode
from graft.ops.cached_attention.existing import cached_attention_sdpa
from graft.ops.cached_attention.reference import cached_attention
from graft.ops.cached_attention.triton import cached_attention_triton
from graft.ops.paged_attention.triton import paged_attention_triton
from graft.ops.paged_batches import make
from graft.ops.rope_kv_write import triton as rope_kv_write
from graft.ops.rope_kv_write.cases import CASES as ROPE_CASES
from marks import examples, short

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT = {
    argument.name: index for index, argument in enumerate(torch.ops.graft.cached_attention.default._schema.arguments)
}
EMPTY = torch.empty
# some of a head is rotated and the rest copied
PARTLY = [
    next(c for c in ROPE_CASES if c.name == name) for name in ("glm-4 interleaved, 64 of 128", "norms, 32 of 80")
]


def batch(new, old, h, kv, d, options=(None, None, False), seed=0):
    """Arguments of cached_attention in float32, and what it must give, from float64."""
    g = torch.Generator().manual_seed(seed)
    q, _, _, k_cache, v_cache, _, *rest = make(new, old, h, kv, d, options, DEVICE, torch.float32, g)
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in rest]
    expected = cached_attention(q.double(), k_cache.double(), v_cache.double(), *wide)
    owned = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=DEVICE)
    args = (q, k_cache, v_cache, *rest)
    for table, length in zip(args[AT["block_tables"]].tolist(), args[AT["seq_lens"]].tolist(), strict=True):
        for place in range(length):
            owned[table[place // 16], place % 16] = True
    for cache in (k_cache, v_cache):
        cache[~owned] = torch.nan  # what lies beyond the lengths belongs to nobody
    return args, expected


def changed(args, **named):
    """The same call with other arguments, by name."""
    return tuple(named.get(name, value) for name, value in zip(AT, args, strict=False))


def poisoned(*args, **options):
    made = EMPTY(*args, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def run(kernel, *args, **options):
    """A kernel whose results and workspaces hold NaN before it writes them."""
    with mock.patch.object(torch, "empty", poisoned):
        return kernel(*args, **options)


def split(args, **options):
    named = [args[AT[name]] for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens")]
    return run(decode.split_kv, *named, *args[AT["scale"] :], **options)


def close(left, right):
    return torch.allclose(left.double(), right, rtol=2e-5, atol=2e-5)


OPTIONS = st.tuples(
    st.sampled_from([None, None, 1, 7, 40, 130]), st.sampled_from([None, None, 5.0]), st.booleans()
)  # window, soft cap, sinks


@settings(max_examples=examples(25), deadline=None)
@given(
    old=st.lists(st.sampled_from([0, 1, 14, 15, 16, 63, 64, 65, 127, 270, 700]), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    d=st.sampled_from([16, 24]),
    options=OPTIONS,
    splits=st.sampled_from([1, 2, 4, 8]),
    early=st.booleans(),
)
def test_split_kv_agrees_with_float64(old, group, d, options, splits, early):
    args, expected = batch((1,) * len(old), tuple(old), 2 * group, 2, d, options)
    assert close(split(args, splits=splits, early=early), expected)
    assert not launch.ring(args[0].device).zeros.any()  # left as they were found, for the next call


@pytest.mark.some(1)
@pytest.mark.parametrize("early", [False, True])
def test_a_wrong_variant_of_split_kv_is_caught(early):
    """One key too many in a window, a scale that is off, a part that is left out: the tolerance tells."""
    args, expected = batch((1, 1), (600, 90), 4, 2, 16, (300, None, False))
    assert close(split(args, splits=4, early=early), expected)
    assert not close(split((*args[:9], 301, *args[10:]), splits=4, early=early), expected)
    assert not close(split(changed(args, scale=args[AT["scale"]] * 1.05), splits=4, early=early), expected)
    args, expected = batch((1, 1), (600, 90), 4, 2, 16)
    short = changed(args, seq_lens=args[AT["seq_lens"]] - 256)
    assert not close(split(short, splits=4, early=early), expected)


def test_a_row_without_a_sequence_gives_zeros():
    """Rows that fill up a CUDA graph's batch have no tokens."""
    args, _ = batch((1, 1), (40, 20), 4, 2, 16)
    args[AT["seq_lens"]][1] = 0
    for splits, early in ((1, False), (4, False), (1, True), (4, True)):
        out = split(args, splits=splits, early=early)
        assert torch.equal(out[0, 1], torch.zeros_like(out[0, 1])) and out[0, 0].isfinite().all()


def test_the_number_of_parts_follows_from_the_shapes():
    with mock.patch.object(decode, "processors", lambda _: 132):
        counts = {n: decode.split_count(n, 8, torch.device("cuda")) for n in (1, 2, 8, 16, 64, 256)}
    assert counts == {1: 64, 2: 32, 8: 4, 16: 2, 64: 1, 256: 1}
    with mock.patch.object(decode, "processors", lambda _: 132):
        assert decode.split_count(1, 1, torch.device("cuda")) == decode.MOST_SPLITS


LAYOUTS = st.lists(
    st.tuples(st.sampled_from([1, 2, 5, 16, 20]), st.sampled_from([0, 1, 16, 50, 70])), min_size=1, max_size=3
)


@settings(max_examples=examples(12), deadline=None)
@given(layout=LAYOUTS, group=st.sampled_from([1, 3, 4]), d=st.sampled_from([16, 24]), options=OPTIONS)
def test_prefill_chunks_and_mixtures_agree_with_float64(layout, group, d, options):
    layout = sorted(layout, key=lambda pair: pair[0] > 1)  # decoding ones first, as the scheduler has them
    new, old = zip(*layout, strict=True)
    args, expected = batch(new, old, 2 * group, 2, d, options)
    assert close(run(cached_attention_triton, *args), expected)
    with mock.patch.object(dispatch, "counted_on_device", lambda *_: True):  # nothing taken from the CPU
        assert close(run(cached_attention_triton, *args), expected)
    with mock.patch("graft.ops.cached_attention.triton.LONG_CONTEXT", 0):  # those that decode by split_kv
        assert close(run(cached_attention_triton, *args), expected)


def test_every_tile_of_many_sequences_is_found():
    new = (1,) * 9 + (33, 1, 32, 2, 64, 31, 5, 16, 17, 1)  # tiles of 32 / group tokens
    args, expected = batch(new, range(len(new)), 2, 2, 16)
    assert close(run(cached_attention_triton, *args), expected)


def test_a_wrong_variant_of_prefill_is_caught():
    args, expected = batch((20, 3), (30, 60), 4, 2, 16, (9, None, False))
    assert close(run(cached_attention_triton, *args), expected)
    assert not close(run(cached_attention_triton, *args[:9], 10, *args[10:]), expected)
    args, expected = batch((20, 3), (30, 60), 4, 2, 16)
    later = changed(args, seq_lens=args[AT["seq_lens"]] - 1)  # every token sees one key less
    assert not close(run(cached_attention_triton, *later), expected)


def on_fixed_memory(args, idle, padding):
    """Behind the sequences rows without a token, one of padding and one more, as a captured step has them. The
    padding's keys and values are those of the first sequence."""
    rows = {name: args[AT[name]] for name in ("q", "token_to_seq", "block_tables", "cu_seqlens", "seq_lens")}
    used, n = rows["q"].shape[2], len(rows["seq_lens"])
    more = [used] * idle + [used + padding] * 2
    padded = changed(
        args,
        q=torch.cat((rows["q"], rows["q"][:, :, :1].expand(-1, -1, padding, -1)), 2),
        token_to_seq=torch.cat((rows["token_to_seq"], torch.full((padding,), n + idle, device=DEVICE))),
        block_tables=torch.cat((rows["block_tables"], rows["block_tables"][:1].expand(idle + 2, -1))),
        cu_seqlens=torch.cat((rows["cu_seqlens"], torch.tensor(more, device=DEVICE))),
        seq_lens=torch.cat((rows["seq_lens"], torch.tensor([1] * idle + [padding, 1], device=DEVICE))),
        lens_cpu=torch.tensor([[0, 1]] * (n + idle + 2)),  # of when it was captured
    )
    return padded


@pytest.mark.parametrize(
    ("new", "old", "idle", "padding"),
    [
        ((1, 1, 1, 5), (40, 3, 20, 9), 2, 4),
        ((1, 1, 2), (40, 3, 20), 1, 1),  # the padding begins and ends as a fifth sequence that decodes would
        ((1, 1), (40, 3), 0, 7),
        ((7, 9), (0, 30), 3, 2),  # nobody decodes
        ((1, 1), (20, 0), 1, 14),  # a prompt of one token
    ],
)
def test_who_decodes_in_a_step_on_fixed_memory_is_counted_on_the_device(new, old, idle, padding):
    args, expected = batch(new, old, 4, 2, 16)
    padded = on_fixed_memory(args, idle, padding)
    out = run(cached_attention_triton, *padded)
    assert out.isfinite().all() and close(out[:, : sum(new)], expected)
    if old[0] > 0 and new[0] == 1:
        later = changed(padded, seq_lens=padded[AT["seq_lens"]] - 1)
        assert not close(run(cached_attention_triton, *later)[:, : sum(new)], expected)
        with mock.patch.object(dispatch, "balanced"):  # nobody else computes them
            assert run(cached_attention_triton, *padded)[:, :1].isnan().all()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("new", "old"),
    [((19,), (0,)), ((19,), (40,)), ((1, 1, 7), (40, 3, 20)), ((5, 9, 1), (0, 33, 8)), ((1, 1), (4, 9))],
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_torchs_attention_agrees_with_float64(new, old, heads):
    args, expected = batch(new, old, *heads, 16)
    assert close(run(cached_attention_sdpa, *args), expected)
    assert not close(run(cached_attention_sdpa, *args[:8], args[8] * 1.05), expected)


def test_chunks_through_the_kernels_equal_the_whole():
    g = torch.Generator().manual_seed(1)
    h, kv, d, n, block = 4, 2, 16, 61, 8
    q, k, v = (torch.randn(1, heads, n, d, generator=g).to(DEVICE) for heads in (h, kv, kv))
    table = torch.tensor([[5, 1, 3, 0, 7, 2, 6, 4]], device=DEVICE)
    for window, softcap in ((None, None), (7, None), (None, 4.0)):
        whole = OPS["attention"].reference(q, k, v, None, d**-0.5, True, window, softcap)
        caches = [torch.full((9, block, kv, d), torch.nan, device=DEVICE) for _ in range(2)]
        ours = mock.patch.multiple(  # not torch's
            choice, needs_triton=lambda *_: None, counted_on_device=lambda *_: True
        )
        parts, first = [], 0
        for last in (11, 12, 13, 40, n):
            places = torch.arange(first, last, device=DEVICE)
            slots = table[0, places // block] * block + places % block
            cu_seqlens, seq_lens = (torch.tensor(t, device=DEVICE) for t in ([0, last - first], [last]))
            layout = (slots, slots * 0, table, cu_seqlens, seq_lens, torch.tensor([[last - first, last]]))
            chunk = (t[:, :, first:last] for t in (q, k, v))
            with ours:
                parts.append(run(paged_attention_triton, *chunk, *caches, *layout, d**-0.5, window, softcap))
            first = last
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-5, atol=2e-5)


def test_which_kernel_takes_a_call_is_said():
    spec = OPS["cached_attention"]
    args, _ = batch((1, 3), (4, 0), 4, 2, 16)
    call = spec.call(*args)
    assert spec.kernel("split_kv").varies(call) == "not every sequence brings a single token"
    sdpa = spec.kernel("sdpa").problem
    assert sdpa(call._replace(softcap=5.0)) == "scaled_dot_product_attention has no soft cap"
    assert sdpa(call._replace(softcap=None, sinks=args[0])) == "scaled_dot_product_attention has no sinks"
    if DEVICE == "cpu":
        assert choose(spec, spec.call(*args)).name == "reference"
        assert all("run on a GPU" in spec.kernel(name).problem(call) for name in ("split_kv", "sdpa", "triton"))
    with mock.patch.object(choice, "needs_triton", lambda *_: None):
        assert choose(spec, spec.call(*args)).name == "sdpa"
        assert choose(spec, spec.call(*args[:9], 100)).name == "sdpa"  # no sequence reaches the window
        assert choose(spec, spec.call(*args[:9], 4)).name == "triton"
        assert choose(spec, spec.call(*args[:9], None, 5.0)).name == "triton"
        assert choose(spec, spec.call(*batch((1, 1), (4, 0), 4, 2, 16)[0])).name == "split_kv"
        assert choose(spec, spec.call(*batch((2, 1), (4, 0), 4, 2, 12)[0])).name == "triton"  # heads of 12
        with mock.patch.object(choice, "counted_on_device", lambda *_: True):
            assert choose(spec, spec.call(*args)).name == "triton"
        for new, old, dtype, name in (
            ((5000,), (0,), torch.bfloat16, "sdpa"),
            ((1, 5000), (9, 0), torch.bfloat16, "sdpa"),
            ((5000,), (16,), torch.bfloat16, "triton"),  # behind a prefix
            ((5000, 100), (0, 0), torch.bfloat16, "triton"),  # one of them is short
            ((100,), (0,), torch.float32, "sdpa"),
        ):
            shapes = (new, old, 2, 1, 16, (None, None, False))
            q, _, _, k_cache, v_cache, _, *rest = make(*shapes, DEVICE, dtype, torch.Generator().manual_seed(0))
            assert choose(spec, spec.call(q, k_cache, v_cache, *rest)).name == name, (new, old, dtype)


@pytest.mark.parametrize("few", [rope_kv_write.FEW, 0], ids=["few tokens", "many"])
@pytest.mark.parametrize("case", short(ROPE_CASES, *PARTLY), ids=lambda case: case.name)
def test_the_cache_holds_what_the_reference_writes_and_nothing_else_changes(case, few):
    args = case.make(DEVICE, torch.float32, torch.Generator().manual_seed(0))
    mine, theirs = ([t.clone() for t in args[5:7]] for _ in range(2))
    expected = OPS["rope_kv_write"].reference(*args[:5], *theirs, *args[7:])
    with mock.patch.object(rope_kv_write, "FEW", few):  # one head a program, or several
        found = run(rope_kv_write.rope_kv_write_triton, *args[:5], *mine, *args[7:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    slots = args[7]
    for new, right, old in zip(mine, theirs, args[5:7], strict=True):
        flat, wanted, before = (t.view(-1, *t.shape[2:]) for t in (new, right, old))
        torch.testing.assert_close(flat[slots], wanted[slots], rtol=1e-5, atol=1e-5)
        assert not torch.equal(flat[slots], before[slots])
        flat[slots] = before[slots]
        assert torch.equal(flat, before)


def evenly(args, programs):
    named = [args[AT[name]] for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens")]
    return run(balanced, *named, *args[AT["scale"] :], programs=programs)


@settings(max_examples=examples(25), deadline=None)
@given(
    old=st.lists(st.sampled_from([0, 1, 14, 15, 16, 63, 64, 65, 127, 270]), min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 4, 12]),
    d=st.sampled_from([16, 24]),
    options=OPTIONS,
    programs=st.sampled_from([1, 2, 3, 7, 30, 500]),
)
def test_even_shares_agree_with_float64(old, group, d, options, programs):
    """A context in one share, in parts of two, in many, and more programs than tiles."""
    args, expected = batch((1,) * len(old), tuple(old), 2 * group, 2, d, options)
    assert close(evenly(args, programs), expected)
    assert not launch.ring(args[0].device).zeros.any()  # left as they were found, for the next call


def test_wrong_even_shares_are_caught():
    args, expected = batch((1, 1, 1), (300, 90, 5), 4, 2, 16, (200, None, False))
    assert close(evenly(args, 7), expected)
    assert not close(evenly((*args[:9], 201, *args[10:]), 7), expected)
    assert not close(evenly(changed(args, scale=args[AT["scale"]] * 1.05), 7), expected)
    args[AT["seq_lens"]][1] = 0  # a row that fills up a CUDA graph's batch
    out = evenly(args, 7)
    assert torch.equal(out[0, 1], torch.zeros_like(out[0, 1])) and close(out[:, ::2], expected[:, ::2])


@triton.jit
def shares_kernel(firsts, owners, shares, tiles, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(firsts + index, first_of(index, shares, tiles))
    tl.store(owners + index, owner_of(index, shares, tiles))


@settings(max_examples=examples(40), deadline=None)
@given(tiles=st.integers(1, 500), shares=st.integers(1, 500))
def test_the_owner_of_a_tile_has_it_in_its_share(tiles, shares):
    shares = min(shares, tiles)
    firsts, owners = (torch.zeros(512, dtype=torch.int32, device=DEVICE) for _ in range(2))
    run(shares_kernel[(1,)], firsts, owners, shares, tiles, N=512)
    owner, tile = owners[:tiles].long(), torch.arange(tiles, device=DEVICE)
    assert (firsts[owner] <= tile).all() and (tile < firsts[owner + 1]).all()
    assert owner.unique().tolist() == list(range(shares)), "no share is empty"
