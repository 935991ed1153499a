"""Which kernel of fused_linear runs: tables, lookups, and what is said about them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import TableError
from graft.ops.fused_linear import choice
from graft.ops.fused_linear.choice import (
    KernelChoice,
    choose_kernel,
    look_up,
    overridden,
    ranges,
    ranges_text,
    tuned_file,
)
from graft.ops.fused_linear.kinds import (
    WEIGHTS,
    BalancedGemm,
    Gemm,
    Int4Gemm,
    LinearShape,
    Matvec,
    how_problem,
    how_text,
)
from graft.ops.fused_linear.tables import TunedEntry, merge, parse_table, read_table, table_json, write_table
from graft.ops.spec import Pick

H200 = "NVIDIA H200"
SQUARE = LinearShape(4096, 4096, "plain", False, False)
sizes = st.sampled_from([8, 64, 576, 1536, 4096, 14336])
shapes = st.builds(LinearShape, sizes, sizes, st.sampled_from(WEIGHTS), st.booleans(), st.booleans())
counts = st.sampled_from([1, 2, 3, 4, 8, 16, 100])
hows = st.one_of(
    st.none(),
    st.builds(Matvec, st.sampled_from([1, 2, 4])),
    st.builds(Gemm, st.sampled_from([32, 64]), early=counts),
    st.builds(Int4Gemm, st.sampled_from([4, 8]), st.sampled_from([2, 8]), st.sampled_from([0, 3])),
)
entries = st.builds(
    TunedEntry,
    hows,
    st.floats(0.5, 900).map(lambda us: round(us, 2)),
    st.just(H200),
    st.sampled_from(["alone", "in a step"]),
)


@st.composite
def tables(draw):
    """Tables as a file may hold them: no kernel where it cannot run."""
    drawn = draw(st.dictionaries(shapes, st.dictionaries(counts, entries, min_size=1, max_size=4), max_size=6))
    return {
        shape: {
            count: entry if how_problem(entry.how, shape, count) is None else replace(entry, how=None)
            for count, entry in found.items()
        }
        for shape, found in drawn.items()
    }


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    choice.forget()
    yield tmp_path
    choice.forget()


@given(tables(), shapes, st.integers(1, 200))
def test_a_lookup_takes_the_nearest_shape_and_the_next_count(table, shape, tokens):
    found = look_up(table, shape, tokens, H200)
    fitting = [one for one in table if one.format == shape.format]
    if not fitting:
        assert found.how is None and found.nearest is None and "no table has" in found.source
        return
    assert found.nearest in fitting
    assert shape.distance(found.nearest) == min(shape.distance(one) for one in fitting)
    measured = table[found.nearest]
    fallback = "torch's own GEMM" if shape.format == "plain" else "the default tensor-core kernel"
    if tokens > max(measured):
        assert found.how is None and found.device is None and fallback in found.source
        return
    count = min(c for c in measured if c >= tokens)
    assert found.how == measured[count].how and found.device == H200
    where = "this shape" if shape in table else f"nearest shape {found.nearest.key()}"
    noun = "token" if count == 1 else "tokens"
    assert found.source == f"measured on {H200} {measured[count].measured}, {where}, {count} {noun}"


@given(tables())
def test_a_table_survives_its_file(table):
    assert parse_table(json.loads(json.dumps(table_json(table))), "x") == table


@given(tables(), tables())
def test_the_later_of_two_tables_goes_first_count_by_count(below, above):
    both = merge(below, above)
    assert set(both) == {*below, *above}
    for shape, found in both.items():
        for count, entry in found.items():
            assert entry == above.get(shape, {}).get(count, below.get(shape, {}).get(count))


@given(st.dictionaries(counts, entries, min_size=1))
def test_ranges_cover_every_count_once_with_what_a_lookup_gives(found):
    parts = ranges(found)
    assert parts[0].first == 1 and parts[-1].last is None and parts[-1].entry is None
    assert [part.first for part in parts[1:]] == [part.last + 1 for part in parts[:-1]]
    for tokens in range(1, 102):
        part = next(p for p in parts if p.first <= tokens and (p.last is None or tokens <= p.last))
        count = min((c for c in found if c >= tokens), default=None)
        assert (part.entry is None) == (count is None)
        if count is not None:
            assert (part.entry.how, part.entry.measured) == (found[count].how, found[count].measured)
    for one, other in pairwise(parts[:-1]):
        assert not choice.same(one.entry, other.entry)


def test_the_text_of_ranges():
    wide = Gemm(64, 64, early=4)
    found = {
        1: TunedEntry(Matvec(2), 9.5, H200, "in a step"),
        4: TunedEntry(wide, 13.0, H200),
        64: TunedEntry(wide, 14.0, H200),
    }
    gemm = "gemm(rows=64, tokens=64, depth=128, splits=1, warps=4, stages=4, early=4)"
    assert ranges_text(SQUARE, found) == (
        f"plain 4096x4096: 1 matvec(rows=2, warps=4), 2–64 {gemm}, more: library;"
        " measured on NVIDIA H200 in a step (1), NVIDIA H200 alone (2–64)"
    )
    quantized = replace(SQUARE, format="int8", gated=True, norm=True)
    assert ranges_text(quantized, {4: TunedEntry(None, 1.0, "B")}) == (
        "int8 4096x4096 gated norm: 1–4 default, more: default; measured on B alone"
    )
    assert how_text(Gemm(early=4, norm_inside=True)).endswith("stages=4, early=4, norm_inside=True)")


@pytest.mark.parametrize(
    "how, format, reason",
    [
        (BalancedGemm(rows=112), "plain", None),
        (BalancedGemm(rows=112), "int8", "balanced_gemm takes plain weights, not int8"),
        (BalancedGemm(rows=100), "plain", "balanced_gemm takes 16, 32 … 496 rows, not 100"),
        (BalancedGemm(rows=512), "plain", "balanced_gemm takes 16, 32 … 496 rows, not 512"),
    ],
)
def test_even_shares_say_what_they_cannot_take(how, format, reason):
    assert how_problem(how, replace(SQUARE, format=format), 64) == reason


@pytest.mark.parametrize(
    "how, format, k, tokens, reason",
    [
        (Int4Gemm(), "int4", 4096, 8, None),
        (Int4Gemm(), "plain", 4096, 1, "int4_gemm takes int4 weights, not plain"),
        (Int4Gemm(), "int4", 4096, 9, "int4_gemm takes up to 8 tokens"),
        (Int4Gemm(), "int4", 4608, 1, "int4_gemm needs a depth that is a multiple of 1024, not 4608"),
        (Int4Gemm(3), "int4", 4096, 1, "int4_gemm takes 2, 4 or 8 ahead and 8 / ahead … 16 warps, not 8 and 3"),
        (Int4Gemm(2, 2), "int4", 4096, 1, "int4_gemm takes 2, 4 or 8 ahead and 8 / ahead … 16 warps, not 2 and 2"),
        (Int4Gemm(4, 8, 3), "int4", 4096, 1, None),
        (Int4Gemm(4, 8, 3), "int4", 5120, 1, "int4_gemm walks over rows of up to 4096, not 5120"),
    ],
)
def test_narrow_says_what_it_cannot_take(how, format, k, tokens, reason):
    assert how_problem(how, replace(SQUARE, format=format, k=k), tokens) == reason


def test_another_device_is_told():
    table = {SQUARE: {4: TunedEntry(Gemm(), 1.0, H200)}}
    assert look_up(table, SQUARE, 2, "NVIDIA A100").source == (
        "measured on NVIDIA H200 (this is NVIDIA A100) alone, this shape, 4 tokens"
    )


def test_a_kernel_that_cannot_run_the_shape_at_hand_is_not_taken():
    """The nearest shape was measured with matvec, which reads 8 values at a time."""
    table = {SQUARE: {1: TunedEntry(Matvec(), 1.0, H200)}}
    assert look_up(table, replace(SQUARE, k=4088), 1, H200).how == Matvec()
    odd = look_up(table, replace(SQUARE, k=4090), 1, H200)
    assert odd.how is None and "but matvec needs a depth that is a multiple of 8, not 4090" in odd.source
    further = replace(SQUARE, n=512)
    table[further] = {1: TunedEntry(Gemm(), 1.0, H200), 4: TunedEntry(Gemm(32), 1.0, H200)}
    assert look_up(table, replace(SQUARE, k=4090), 1, H200) == KernelChoice(
        Gemm(),
        "measured on NVIDIA H200 alone, nearest shape plain 512x4096, 1 token; that of plain 4096x4096 is nearer, but"
        " matvec needs a depth that is a multiple of 8, not 4090",
        further,
        H200,
    )
    many = look_up(table, replace(SQUARE, k=4090), 4, H200)  # the nearest was not measured with so many
    assert many.how is None and "more than the 1 token measured for plain 4096x4096" in many.source


def test_the_shipped_table_can_be_read():
    table = choice.shipped_table()
    assert {shape.format for shape in table} == set(WEIGHTS)
    assert all((entry.us is None or entry.us > 0) for found in table.values() for entry in found.values())


def test_what_was_measured_here_goes_before_what_is_shipped(cache):
    before = choose_kernel(SQUARE, 1, "my GPU/1")
    assert "measured on NVIDIA H200 (this is my GPU/1)" in before.source
    write_table({SQUARE: {1: TunedEntry(Matvec(4, 8), 1.0, "my GPU/1")}}, tuned_file("my GPU/1"))
    assert tuned_file("my GPU/1").parent == cache / "tuned"
    assert choose_kernel(SQUARE, 1, "my GPU/1") is before  # lookups are kept
    choice.forget()
    assert choose_kernel(SQUARE, 1, "my GPU/1").how == Matvec(4, 8)
    shipped = choice.shipped_table()[SQUARE]
    assert choose_kernel(SQUARE, 4, "my GPU/1").how == shipped[16].how  # other counts stay
    assert choose_kernel(SQUARE, 1, "another").how == before.how


def test_overrides_hold_for_a_time_and_nest(cache):
    usual = choose_kernel(SQUARE, 1, "gpu").how
    first, second = Matvec(4, 8), Matvec(1, 8)
    with overridden({SQUARE: {1: TunedEntry(first, 0.0, "gpu")}}):
        assert choose_kernel(SQUARE, 1, "gpu").how == first
        with overridden({SQUARE: {1: TunedEntry(second, 0.0, "gpu")}}):
            assert choose_kernel(SQUARE, 1, "gpu").how == second
        assert choose_kernel(SQUARE, 1, "gpu").how == first
    assert choose_kernel(SQUARE, 1, "gpu").how == usual
    with pytest.raises(ZeroDivisionError), overridden({SQUARE: {1: TunedEntry(first, 0.0, "gpu")}}):
        assert choose_kernel(SQUARE, 1, "gpu").how == first
        raise ZeroDivisionError
    assert choose_kernel(SQUARE, 1, "gpu").how == usual and choice.OVERRIDES == []


KEY = "plain 4096x4096"


def one(**entry):
    return {KEY: {"device": H200, "tokens": {"4": {"kind": "gemm", "us": 1.0, **entry}}}}


WRONG = [
    ([], "the whole file must be an object"),
    ({"plane 4096x4096": {}}, "unknown shape 'plane 4096x4096'"),
    ({"plain 4096x0": {}}, "unknown shape"),
    ({"plain 4096x4096 norm gated": {}}, "unknown shape"),
    ({KEY: 3}, "'plain 4096x4096' must be an object"),
    ({KEY: {"tokens": {}}}, "'device' is missing"),
    ({KEY: {"device": 3, "tokens": {}}}, "device must be the name of one"),
    ({KEY: {"device": H200, "token": {}}}, "unknown key 'token'; did you mean 'tokens'?"),
    ({KEY: {"device": H200, "tokens": {"0": {}}}}, "at least 1, not '0'"),
    (one(kind="gem"), "'plain 4096x4096', 4 tokens: unknown kind 'gem'; did you mean"),
    (one(kind=["gemm"]), "unknown kind"),
    (one(kind="default"), "unknown kind 'default'"),
    (one(row=64), "unknown key 'row'; did you mean 'rows'"),
    (one(rows="64"), "rows must be a whole number of at least 1, but is '64'"),
    (one(rows=0), "rows must be"),
    (one(early=-1), "early must be a whole number of at least 0"),
    (one(norm_inside=1), "norm_inside must be true or false"),
    (one(us="fast"), "us must be a number"),
    (one(measured="yesterday"), "measured must be one of alone, in a step"),
    ({KEY: {"device": H200, "tokens": {"4": {"kind": "gemm"}}}}, "'us' is missing"),
    ({KEY: {"device": H200, "tokens": {"8": {"kind": "matvec", "us": 1}}}}, "matvec takes up to 4 tokens"),
    ({"int4 64x64": {"device": H200, "tokens": {"8": {"kind": "matvec", "us": 1}}}}, "up to 4 tokens"),
    ({"int8 64x64": {"device": H200, "tokens": {"1": {"kind": "library", "us": 1}}}}, "unknown kind 'library'"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_table_is_refused_with_file_and_key(content, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TableError) as error:
        read_table(path)
    assert message in str(error.value) and str(path) in str(error.value)
    path.write_text(json.dumps(one()))
    assert read_table(path) == {SQUARE: {4: TunedEntry(Gemm(), 1.0, H200)}}


def test_a_broken_file_is_refused_where_it_is_looked_up(cache):
    path = tuned_file("gpu")
    path.parent.mkdir()
    for content in (b'{"plain', b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(TableError, match=r"gpu\.json"):
            choose_kernel(SQUARE, 1, "gpu")
    path.unlink()
    assert choose_kernel(SQUARE, 1, "gpu").how is not None


def test_writing_merges_and_leaves_nothing_half_written(tmp_path):
    path = tmp_path / "deep" / "mine.json"
    other = replace(SQUARE, norm=True)
    write_table({SQUARE: {1: TunedEntry(Matvec(2), 3.0, "A")}, other: {1: TunedEntry(None, 2.0, "A")}}, path)
    write_table({SQUARE: {1: TunedEntry(Matvec(4), 2.5, "A", "in a step"), 8: TunedEntry(None, 4.0, "A")}}, path)
    assert read_table(path) == {
        SQUARE: {1: TunedEntry(Matvec(4), 2.5, "A", "in a step"), 8: TunedEntry(None, 4.0, "A")},
        other: {1: TunedEntry(None, 2.0, "A")},
    }
    write_table({SQUARE: {2: TunedEntry(Matvec(1), 2.0, "B")}}, path)  # a file names one device for a shape
    assert read_table(path)[SQUARE] == {2: TunedEntry(Matvec(1), 2.0, "B")}
    assert [p.name for p in path.parent.iterdir()] == ["mine.json"]


def test_rows_are_shared_out_for_the_shape_at_hand():
    """112 rows of 14,336 are 128 programs; of another shape there are as many, and rows stay multiples of 16."""
    table = {LinearShape(14336, 4096, "plain", True, True): {64: TunedEntry(BalancedGemm(rows=112), 60.0, H200)}}
    for n, rows in ((14336, 112), (12288, 96), (11008, 96), (3072, 32), (100, 16), (256000, 256)):
        found = look_up(table, LinearShape(n, 4096, "plain", True, True), 32, H200).how
        assert isinstance(found, BalancedGemm) and found.rows == rows, n


@pytest.mark.parametrize(
    ("format", "tokens", "kernel"),
    [
        ("int4", 128, "integer_gemm"), ("int4", 129, "library"), ("int4", 8192, "library"),
        ("int8", 2047, "integer_gemm"), ("int8", 2048, "library"), ("fp8", 8192, "gemm"),
    ],
)  # fmt: skip
def test_weights_are_widened_at_once_for_many_tokens(format, tokens, kernel):
    """Where Hopper's kernel does not go before. What was measured goes first all the same."""
    shape = LinearShape(4096, 4096, format, False, False)
    kernels = [pick.kernel for pick in choice.picks_of(None, shape, tokens)]
    assert next(one for one in kernels if one != "mixed_gemm") == kernel
    assert choice.picks_of(Gemm(), shape, tokens)[0] == Pick("gemm", Gemm())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "plain"])
def test_weights_are_widened_ahead_of_tensor_cores_for_some_tokens(format):
    shape = LinearShape(4096, 4096, format, False, False)
    for tokens in (1, 32, 33, 64, 65, 2048, 2049):
        some = 33 <= tokens <= 2048 and (format == "int4" or (format == "int8" and tokens != 64))
        kernels = [pick.kernel for pick in choice.picks_of(None, shape, tokens)]
        assert ("mixed_gemm" in kernels, kernels[0] == "mixed_gemm") == (some, some), tokens


@pytest.mark.parametrize(
    ("n", "gated", "kernel"), [(49155, False, "gemm"), (49152, False, "library"), (12, True, "library")]
)
def test_rows_that_torch_is_slow_with_run_the_default_kernel(n, gated, kernel):
    shape = LinearShape(n, 2048, "plain", gated, norm=False)
    assert choice.picks_of(None, shape, 32)[0].kernel == kernel
    default = "the default tensor-core kernel" if kernel == "gemm" else "torch's own GEMM"
    assert default in look_up({}, shape, 32, H200).source
