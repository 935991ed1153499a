"""The library's transforms on every family: counts, numerics, metadata, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import map_arg

from conftest import FAMILIES, graph_of
from graft.base.errors import TransformError
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, module_path, source_line
from graft.ir.patterns.arguments import arguments
from graft.ir.patterns.words import Path, deciding
from graft.ir.trace import export_graph, trace_function
from graft.models.load import load_model
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.testing.negatives import examples, literals, positive, variants
from marks import KINDS, cross, firsts, short

load_all()
OTHERS = ("insert_kv_cache", "insert_state_cache", "widen_linear", "fuse_all_reduce_norm")
PATTERNS = [
    (name, rewrite, path)
    for name in TransformRegistry.names()
    for config in [load_config().transforms[name]]
    # those of decode steps, of a new input, of one kind of CPU and of several ranks have tests of their own
    if not hasattr(config, "devices") and name not in OTHERS
    for rewrite in getattr(TransformRegistry.get(name)(config), "rewrites", lambda: [])()
    for path in variants(rewrite)
]
IDS = [f"{n}:{r.pattern.__name__}{''.join(map(str, path.whole))}" for n, r, path in PATTERNS]


def only(*names):
    known = TransformRegistry.names()
    return load_config({"transforms": {n: {"enabled": n in names} for n in known}})


def transform(module, args, *names, dynamic_shapes=None):
    gm = export_graph(module, args, dynamic_shapes=dynamic_shapes)
    before = graph_text(gm.graph)
    report = run_pipeline(gm, only(*names))
    return gm, report, before


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", short(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("family", short(FAMILIES, "llama", "gemma-2", "qwen3-moe"))  # others: golden graphs
def test_expected_counts_on_every_family(family, dtype):
    # no device: 16 bits are widened on a CPU. In 32 the graph is that of other tests, which may have captured it
    model = load_model(f"tiny-{family}", dtype=dtype, device="cpu" if dtype == "float32" else "meta")
    gm = graph_of(model.module)
    report = run_pipeline(gm, load_config({"verify": "matches"}), Context(route="decoder"))
    counts = {name: len(record.matches) for name, record in report.transforms.items()}
    assert counts == model.family.expected_matches(model.layers)
    for record in report.transforms.values():
        said = record.matches or record.reason or record.status == "disabled"
        assert said, f"{record.name} did nothing and does not say why"


@pytest.mark.some(2)
@pytest.mark.parametrize("family", short(FAMILIES, *KINDS))
def test_transformed_graph_keeps_the_numbers(family):
    """Fusions and merges on a graph without cache: the logits stay those of Hugging Face."""
    model = load_model(f"tiny-{family}", dtype="float32", device="cpu")
    ids = torch.randint(3, 128, (2, 13), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(13).expand(2, -1)
    with torch.no_grad():
        expected = model.module(input_ids=ids, position_ids=positions, use_cache=False).logits
    gm = graph_of(model.module)
    run_pipeline(gm, load_config(), Context(route="module"))
    with torch.no_grad():
        (logits,) = gm(ids, positions)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def given(rewrite, dtype, path):
    """What a variant of the pattern is called with, and its replacement: what a variant does not read is default."""
    tensors = examples(rewrite, dtype)
    matches, _ = rewrite.finder().find(positive(rewrite, dtype, path).module.graph)
    found = {name: tensors[node.meta["pattern_input"]] for name, node in matches[0].tensors.items()}
    return tensors | literals(rewrite), found | matches[0].literals


@pytest.mark.some(7)
@pytest.mark.parametrize(("name", "rewrite", "path"), firsts(PATTERNS, lambda p: p[0], 3), ids=IDS)
def test_patterns_are_captured_as_models_are(name, rewrite, path):
    """Tracing a pattern directly gives the graph that torch.export gives."""
    tensors, numbers = examples(rewrite, torch.bfloat16), literals(rewrite)

    class Module(nn.Module):
        def forward(self, *args):
            with deciding(Path(path.whole)):
                results = rewrite.pattern(**dict(zip(tensors, args, strict=True)), **numbers)
            return tuple(r for r in results if r is not None) if isinstance(results, tuple) else results

    def structure(graph):
        number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
        return [
            (n.target, str(map_arg(n.args, number.get)), n.kwargs) for n in graph.nodes if n.op == "call_function"
        ]

    exported = export_graph(Module(), tuple(tensors.values()))
    traced = trace_function(Module().forward, tuple(tensors.values()))
    assert structure(exported.graph) == structure(traced.graph)


@pytest.mark.some(50)
@pytest.mark.parametrize(
    ("name", "rewrite", "path", "dtype"),
    cross([name for name, *_ in PATTERNS], PATTERNS, [torch.bfloat16, torch.float32]),
    ids=[f"{one}-{dtype}" for one in IDS for dtype in ("bfloat16", "float32")],
)
def test_replacement_computes_what_the_pattern_computes(name, rewrite, path, dtype):
    pattern, replacement = given(rewrite, dtype, path)
    with deciding(Path(path.whole)):
        wanted = rewrite.pattern(**pattern)
    got = rewrite.replacement(**{a.name: replacement[a.name] for a in arguments(rewrite.replacement)})
    if isinstance(wanted, tuple):
        got, wanted = ([r for r, w in zip(side, wanted, strict=True) if w is not None] for side in (got, wanted))
    # where a spelling may be a few roundings off: of the dtype it ends in, of float32 inside
    bound = 0 if rewrite.exact else 8 * torch.finfo(dtype).eps if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


class Llama(nn.Module):
    """Two blocks of a residual stream with norms."""

    def __init__(self, d=8):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(d)) for _ in range(3)])

    def norm(self, x, i):
        return self.w[i] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def forward(self, x):
        x = x + self.norm(x, 0).exp()
        x = x + self.norm(x, 1).sin()
        return self.norm(x, 2)


def test_add_goes_into_the_norm_and_the_sum_stays_readable():
    module, x = Llama(), torch.randn(2, 3, 8)
    gm, report, _ = transform(module, (x,), "fuse_rms_norm", "fuse_add_rms_norm")
    assert len(report.transforms["fuse_rms_norm"].matches) == 3
    assert len(report.transforms["fuse_add_rms_norm"].matches) == 2
    assert torch.equal(gm(x), module(x))


def test_add_with_a_broadcast_summand_is_left_alone():
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8))

        def forward(self, x, y):
            s = x + y
            return self.w * (s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-5)), s

    _, report, _ = transform(
        Broadcast(), (torch.randn(2, 3, 8), torch.randn(8)), "fuse_rms_norm", "fuse_add_rms_norm"
    )
    record = report.transforms["fuse_add_rms_norm"]
    assert record.status == "no_match" and "broadcast" in record.reason


def test_weight_that_is_not_a_parameter_is_refused_byte_for_byte():
    def norm(x, w):
        return w.exp() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    class Computed(nn.Module):
        def forward(self, x, w):
            return norm(x, w)

    gm, report, before = transform(Computed(), (torch.randn(2, 8), torch.randn(8)), "fuse_rms_norm")
    assert "is computed in the graph" in report.transforms["fuse_rms_norm"].reason
    assert graph_text(gm.graph) == before


def test_float32_weight_on_bfloat16_input_keeps_its_dtype():
    """Stock matchers fuse this to the wrong dtype; here the result stays what it was."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8))

        def forward(self, x):
            h = x.to(torch.float32)
            return self.w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    module, x = Mixed(), torch.randn(2, 8).to(torch.bfloat16)
    gm, _, _ = transform(module, (x,), "fuse_rms_norm")
    assert gm(x).dtype == module(x).dtype == torch.float32
    assert torch.equal(gm(x), module(x))


class Gated(nn.Module):
    def __init__(self, activation, bias=False, tie=False, uneven=False):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 12, bias), nn.Linear(8, 12, bias)
        if uneven:
            self.up = nn.Linear(8, 12, not bias)
        self.other = nn.Linear(8, 12, bias)
        self.tie = tie
        if tie:
            self.other.weight = self.gate.weight
        self.activation = activation

    def forward(self, x):
        y = self.activation(self.gate(x)) * self.up(x)
        return y + self.other(x.exp()) if self.tie else y


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_fuses_and_merges(activation, bias):
    module, x = Gated(ACTIVATIONS[activation], bias), torch.randn(3, 5, 8)
    expected = module(x)
    gm, report, _ = transform(module, (x,), "fuse_swiglu", "merge_gate_up")
    assert [len(report.transforms[n].matches) for n in ("fuse_swiglu", "merge_gate_up")] == [1, 1]
    torch.testing.assert_close(gm(x), expected)
    assert sum(is_op(n, torch.ops.aten.linear.default) for n in calls(gm.graph)) == 1


def test_merged_weights_are_views_of_one_tensor():
    module = Gated(F.silu)
    transform(module, (torch.randn(2, 8),), "fuse_swiglu", "merge_gate_up")
    gate, up = module.gate.weight, module.up.weight
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert gate.untyped_storage().nbytes() == 4 * (gate.numel() + up.numel())


def test_merging_leaves_alone_what_it_must():
    _, report, _ = transform(Gated(F.silu, tie=True), (torch.randn(2, 8),), "fuse_swiglu", "merge_gate_up")
    record = report.transforms["merge_gate_up"]
    assert record.status == "no_match" and "tied" in record.reason


def test_one_with_a_bias_and_one_without_are_merged():
    module, x = Gated(F.silu, uneven=True), torch.randn(2, 8)
    expected = module(x)
    gm, report, _ = transform(module, (x,), "fuse_swiglu", "merge_gate_up")
    assert len(report.transforms["merge_gate_up"].matches) == 1
    torch.testing.assert_close(gm(x), expected)


def test_gate_and_up_of_different_shapes_do_not_fuse():
    class Broadcast(nn.Module):
        def forward(self, g, u):
            return F.silu(g) * u

    _, report, _ = transform(Broadcast(), (torch.randn(2, 3, 8), torch.randn(8)), "fuse_swiglu")
    assert "broadcast" in report.transforms["fuse_swiglu"].reason


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Rotary(nn.Module):
    def __init__(self, r=None):
        super().__init__()
        self.r = r

    def forward(self, x, cos, sin):
        if self.r is None:
            return rotate(x, cos, sin)
        return torch.cat((rotate(x[..., : self.r], cos, sin), x[..., self.r :]), -1)


@pytest.mark.parametrize("r", [None, 8])
def test_rope_fuses_whole_and_partial(r):
    x, angles = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, r or 16)
    module = Rotary(r)
    gm, report, _ = transform(module, (x, angles.cos(), angles.sin()), "fuse_rope")
    assert len(report.transforms["fuse_rope"].matches) == 1
    assert torch.equal(gm(x, angles.cos(), angles.sin()), module(x, angles.cos(), angles.sin()))


def test_rope_with_angles_for_each_head_is_refused():
    x, angles = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16)
    _, report, _ = transform(Rotary(), (x, angles.cos(), angles.sin()), "fuse_rope")
    assert "differ between heads" in report.transforms["fuse_rope"].reason


def test_new_nodes_carry_value_place_and_maker():
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    gm = graph_of(model.module)
    report = run_pipeline(gm, load_config(), Context(route="decoder"))
    made = [n for n in calls(gm.graph) if "made_by" in n.meta]
    applied = {name for name, record in report.transforms.items() if record.status == "applied"}
    assert {n.meta["made_by"] for n in made} == applied >= {"fuse_rms_norm", "merge_qkv", "insert_kv_cache"}
    for node in made:
        assert "val" in node.meta and module_path(node) and source_line(node), node


def test_decoder_transforms_skip_other_modules_with_a_reason():
    _, report, _ = transform(Llama(), (torch.randn(2, 3, 8),), "last_token_logits", "insert_kv_cache")
    for name in ("last_token_logits", "insert_kv_cache"):
        assert report.transforms[name].status == "skipped" and "engine" in report.transforms[name].reason


def test_a_mask_of_its_own_is_refused_by_the_cache():
    class Masked(nn.Module):
        def forward(self, q, mask):
            return (torch.ops.graft.attention(q, q, q, mask, 0.5, False),)

    gm = export_graph(Masked(), (torch.randn(1, 2, 3, 8), torch.ones(1, 1, 3, 3, dtype=torch.bool)))
    with pytest.raises(TransformError, match=r"insert_kv_cache.*a mask of its own"):
        run_pipeline(gm, only("insert_kv_cache"), Context(route="decoder"))


def test_two_merges_in_one_module_do_not_share_a_name():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 12, False) for _ in range(4)])

        def forward(self, x):
            g0, u0, g1, u1 = self.layers
            return F.silu(g0(x)) * u0(x) + F.silu(g1(x)) * u1(x)

    module, x = Twins(), torch.randn(3, 8)
    expected = module(x)
    gm, report, _ = transform(module, (x,), "fuse_swiglu", "merge_gate_up")
    assert len(report.transforms["merge_gate_up"].matches) == 2
    torch.testing.assert_close(gm(x), expected)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_weights_at_the_root_merge_and_buffers_do_not(kind):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("wg", "wu"):
                tensor = torch.randn(12, 8)
                if kind == "parameter":
                    self.register_parameter(name, nn.Parameter(tensor))
                else:
                    self.register_buffer(name, tensor)

        def forward(self, x):
            return F.silu(F.linear(x, self.wg)) * F.linear(x, self.wu)

    module, x = Root(), torch.randn(3, 8)
    gm, report, _ = transform(module, (x,), "fuse_swiglu", "merge_gate_up")
    record = report.transforms["merge_gate_up"]
    assert (len(record.matches) == 1) if kind == "parameter" else ("is not a parameter" in record.reason)
    torch.testing.assert_close(gm(x), module(x))


def test_rope_with_one_angle_for_the_whole_head_is_refused():
    x, angles = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 1)
    module = Rotary()
    gm, report, _ = transform(module, (x, angles.cos(), angles.sin()), "fuse_rope")
    assert "broadcast over the head" in report.transforms["fuse_rope"].reason
    assert torch.equal(gm(x, angles.cos(), angles.sin()), module(x, angles.cos(), angles.sin()))
