"""shard_tensor_parallel: the parts of all ranks, run as threads, give what the whole graph gives."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
import torch

import graft
import graft.passes.library.shard.vocabulary as vocabulary
from conftest import FAMILIES, tiny
from graft.base.errors import NoRanks, TransformError, UsageError
from graft.ir.nodes import calls, is_op, tensor_of
from graft.ops.ranks import run_as_ranks
from graft.passes.base import Stage
from graft.passes.library.shard.shard_tensor_parallel import ShardConfig
from graft.passes.library.shard.splits import share
from graft.passes.library.shard.writing import Twins
from marks import short
from rank_cases import logits_of, parts_of, sharded, some_tokens, together, whole_graph

ops, aten = torch.ops.graft, torch.ops.aten
LIMIT = (
    2e-5  # of logits near 1: sums of 64 in float32, in another order, through two layers; faults make 1e-3 and more
)


SPLIT = ("llama", "gpt2", "qwen3-moe", "olmo-2")  # plain; biases; experts; norms over all heads
# norms over all heads; transposed experts, biases; norms behind what is split. Latent attention: test_latent_cache.py
TOGETHER = ("olmo-2", "gpt-oss", "bitnet")
# layers with an MLP beside the experts, and MLPs behind recurrent layers
MORE = {"deepseek-v2": 1, "deepseek-v3": 1, "qwen2-moe": 2, "lfm2": 3, "qwen3-next": 4 + 3}
NORMS = ("olmo-2", "olmo-3", "bitnet")  # of rows that several ranks have parts of, two a layer
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")  # what every rank computes its heads from
RECURRENT = (".conv.", ".linear_attn.")  # layers that are whole on every rank


def counts(part, *targets):
    return sum(is_op(node, *targets) for node in calls(part.graph))


@pytest.mark.parametrize("world", [2, 4])  # 4 ranks: the two key-value heads are each on two of them
@pytest.mark.parametrize("family", short([f for f in FAMILIES if f != "smollm2"], *TOGETHER))
def test_the_ranks_together_give_what_one_gives(family, world):
    whole = whole_graph(family)
    expected = logits_of(whole)
    parts, record = parts_of(whole, world)
    found = together(parts)
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0] - expected).abs().max() < LIMIT * expected.abs().max().clamp_min(1)
    layers = counts(whole, ops.attention.default)
    regions = 2 * layers + MORE.get(family, 0)
    assert record.status == "applied" and len(record.matches) == regions + 2
    norms = 2 * layers * (family in NORMS)  # their squares are added up too
    assert counts(parts[0], ops.all_reduce.default) == regions + 1 + norms
    assert counts(parts[0], ops.all_gather.default) == 1


@pytest.mark.parametrize("family", short(FAMILIES, "gpt2", "qwen3-moe"))
def test_each_rank_has_its_share_of_the_weights(family):
    world, whole = (3 if family == "smollm2" else 2), whole_graph(family)
    total = sum(p.numel() for p in {id(p): p for p in whole.parameters()}.values())
    part, _ = sharded(whole, 1, world)
    positions = 256 * 32 if family == "gpt2" else 0  # of gpt2: its embedding of positions stays whole
    vocabulary = 128 * 36 if family == "smollm2" else 0  # 128 tokens on 3 ranks
    latent = sum(p.numel() for name, p in whole.named_parameters() if name.split(".")[-2] in LATENT)
    recurrent = sum(p.numel() for name, p in whole.named_parameters() if any(kind in name for kind in RECURRENT))
    stays = positions + vocabulary + latent + recurrent
    assert sum(p.numel() for p in part.parameters()) - stays <= 1.06 * (total - stays) / world


def test_nine_heads_are_for_three_ranks():
    parts, record = parts_of(whole_graph("smollm2"), 3)
    assert (together(parts)[0] - logits_of(whole_graph("smollm2"))).abs().max() < LIMIT
    assert {match.pattern for match in record.matches} == {"attention", "mlp"}
    assert any("a vocabulary of 128 does not divide by 3 ranks" in miss.reason for miss in record.near_misses)


def test_what_cannot_be_split_stays_whole_and_says_why():
    parts, record = parts_of(whole_graph("smollm2"), 2)
    assert (together(parts)[0] - logits_of(whole_graph("smollm2"))).abs().max() < LIMIT
    assert {match.pattern for match in record.matches} == {"embedding", "head", "mlp"}
    reasons = [miss.reason for miss in record.near_misses]
    assert any("9 heads (3 for keys and values) do not divide by 2 ranks" in reason for reason in reasons)
    assert any("q_proj" in reason and "stays whole" in reason for reason in reasons)


def test_a_rank_caches_its_own_heads_alone():
    part, _ = sharded(whole_graph("llama"), 0, 2)
    attention = next(node for node in calls(part.graph) if is_op(node, ops.attention.default))
    assert [tensor_of(one).shape[1] for one in attention.args[:3]] == [2, 1, 1]


def test_the_router_of_experts_stays_whole():
    _, record = parts_of(whole_graph("qwen3-moe"), 2)
    assert sum(match.pattern == "experts" for match in record.matches) == 2
    assert any("mlp.gate" in miss.reason and "stays whole" in miss.reason for miss in record.near_misses)


def test_a_tied_embedding_stays_one_weight():
    part, _ = sharded(whole_graph("cohere"), 0, 2)
    embedding = next(node for node in calls(part.graph) if is_op(node, aten.embedding.default))
    gathered = next(node for node in calls(part.graph) if is_op(node, ops.all_gather.default))
    assert embedding.args[0].target == gathered.args[0].args[1].target


class Experts(torch.nn.Module):
    """A mixture with all that gpt-oss has: biases, rows of gate and up that take turns."""

    def __init__(self, interleaved):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = {"router": (4, 8), "gate_up": (4, 12, 8), "down": (4, 8, 6), "up_bias": (4, 12), "down_bias": (4, 8)}
        for name, size in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size, generator=generator)))
        self.interleaved = interleaved

    def forward(self, x):
        weights, ids = torch.softmax(x @ self.router.T, -1).topk(2)
        biases = self.up_bias, self.down_bias
        return ops.moe_experts(x, weights, ids, self.gate_up, self.down, "silu", *biases, self.interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_bias_of_experts_is_added_once(interleaved):
    module, x = Experts(interleaved), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    settings = [{"transforms": {"shard_tensor_parallel": {"enabled": True, "world": 2, "rank": r}}} for r in (0, 1)]
    with torch.no_grad():
        parts = [graft.compile(module, (x,), config=config, backend="eager") for config in settings]
        found = run_as_ranks([no_grad(part, x) for part in parts])
        assert all((one - module(x)).abs().max() < LIMIT for one in found)


def no_grad(part, x):
    """Threads begin with gradients."""

    def run():
        with torch.no_grad():
            return part(x)

    return run


@pytest.mark.parametrize("family", short(FAMILIES, *SPLIT))
def test_columns_and_rows_are_those_of_hugging_faces_plan(family):
    """Where transformers has a plan for the family, it splits the same axis; it is not what ours is made from."""
    world, config = (3 if family == "smollm2" else 2), tiny(family).module.config
    plan = {name: kind for name, kind in (config.base_model_tp_plan or {}).items() if kind in ("colwise", "rowwise")}
    part, report = sharded(whole_graph(family), 0, world, stages=[Stage.SHARD])
    parts, whole = dict(part.named_parameters()), dict(whole_graph(family).named_parameters())
    told = {
        miss.module for miss in report.transforms["shard_tensor_parallel"].near_misses if ".self_attn" in miss.module
    }
    assert all(module.split(".")[-1] in LATENT for module in told)
    for glob, kind in plan.items():
        for name in (name for name in whole if fnmatch(name, f"model.{glob}.weight")):
            expected = list(whole[name].shape)
            expected[0 if kind == "colwise" else 1] //= world
            assert list(parts[name.removesuffix(".weight") + "_2.weight"].shape) == expected, name


# ── wrong variants ──────────────────────────────────────────────────────────────────────────────────────────────


def no_sum(self, node, partial, bias):
    total = partial if bias is None else self.call(aten.add.Tensor, (partial, bias), like=node)
    self.editor.replace(node, total)
    return total


def bias_of_each(self, node, partial, bias):
    own = partial if bias is None else self.call(aten.add.Tensor, (partial, bias), like=node)
    total = self.call(ops.all_reduce.default, (own, self.world), like=node)
    self.editor.replace(node, total)
    return total


def other_share(size, rank, world):
    return share(size, world - 1 - rank, world)


@pytest.mark.parametrize(
    ("family", "home", "name", "wrong"),
    [
        ("llama", Twins, "reduced", no_sum),
        ("gpt2", Twins, "reduced", bias_of_each),
        ("llama", vocabulary, "share", other_share),
    ],
    ids=["no sum", "the bias of each rank", "the vocabulary of another rank"],
)
def test_a_wrong_split_gives_other_logits(monkeypatch, family, home, name, wrong):
    monkeypatch.setattr(home, name, wrong)
    parts, _ = parts_of(whole_graph(family), 2)
    assert (together(parts)[0] - logits_of(whole_graph(family))).abs().max() > 1e-2


def test_heads_that_belong_to_another_rank_give_other_logits():
    """The part of o_proj must be that of the rank's own heads."""
    parts, _ = parts_of(whole_graph("llama"), 2)
    weights = [dict(part.named_parameters()) for part in parts]
    (name,) = [name for name in weights[0] if name.endswith("layers.0.self_attn.o_proj_2.weight")]
    swapped = [weight[name].data for weight in reversed(weights)]
    for weight, other in zip(weights, swapped, strict=True):
        weight[name].data = other.clone()
    assert (together(parts)[0] - logits_of(whole_graph("llama"))).abs().max() > 1e-2


def test_a_region_that_others_read_is_left_alone():
    """An MLP whose hidden values the graph also returns is needed whole."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x):
            hidden = torch.nn.functional.silu(self.up(x))
            return self.down(hidden), hidden

    sets = {"enabled": True, "world": 2, "rank": 0}
    compiled = graft.compile(Both(), (torch.randn(3, 8),), config={"transforms": {"shard_tensor_parallel": sets}})
    record = compiled.report.transforms["shard_tensor_parallel"]
    assert "needs all of it" in " ".join(miss.reason for miss in record.near_misses)
    assert [match.pattern for match in record.matches] == ["head"]  # columns of `down`, gathered


@pytest.mark.exhaustive
def test_every_match_is_checked_with_all_ranks_beside_each_other():
    _, report = sharded(whole_graph("llama"), 1, 2, "verify=matches", stages=[Stage.SHARD])
    checks = [match.numeric_check for match in report.transforms["shard_tensor_parallel"].matches]
    assert len(checks) == 6 and all(check is not None and check.share < 1 and check.trials > 10 for check in checks)


@pytest.mark.parametrize("wrong", short([no_sum, bias_of_each], bias_of_each))
def test_the_check_finds_a_wrong_split(monkeypatch, wrong):
    monkeypatch.setattr(Twins, "reduced", wrong)
    with pytest.raises(TransformError, match=r"the replacement at .* is"):
        sharded(whole_graph("gpt2"), 0, 2, "verify=matches", stages=[Stage.SHARD])


def test_a_weight_that_the_model_writes_stays_whole():
    class Learning(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x):
            self.up.weight.data.mul_(0.5)
            return self.down(torch.relu(self.up(x))) + x

    config = {"transforms": {"shard_tensor_parallel": {"enabled": True, "world": 2, "rank": 0}}}
    with torch.no_grad():
        compiled = graft.compile(Learning(), (torch.randn(3, 8),), config=config, backend="eager")
    record = compiled.report.transforms["shard_tensor_parallel"]
    assert not any(match.pattern == "mlp" for match in record.matches)
    assert "written in place" in " ".join(miss.reason for miss in record.near_misses)


# ── how it is told and asked ────────────────────────────────────────────────────────────────────────────────────


def test_one_rank_has_nothing_to_split():
    _, report = sharded(whole_graph("llama"), 0, 1)
    record = report.transforms["shard_tensor_parallel"]
    assert record.status == "skipped" and "--tensor-parallel" in record.reason


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_that_cannot_be_is_an_error(world, rank):
    with pytest.raises(UsageError, match="world must be at least 1 and rank below it"):
        ShardConfig("shard", world=world, rank=rank)


def test_a_part_by_itself_says_that_others_are_missing():
    part, _ = sharded(whole_graph("llama"), 0, 2)
    with pytest.raises(NoRanks, match="needs a group of 2 ranks, but this process has none"):
        part(*some_tokens())


def test_a_failure_is_rolled_back(monkeypatch):
    monkeypatch.setattr(Twins, "row", lambda self: 1 / 0)
    with pytest.raises(TransformError, match="division by zero"):
        sharded(whole_graph("llama"), 0, 2)
    part, report = sharded(whole_graph("llama"), 0, 2, "transforms.shard_tensor_parallel.on_error=skip")
    assert report.transforms["shard_tensor_parallel"].status == "rolled_back"
    assert torch.allclose(logits_of(part), logits_of(whole_graph("llama")), atol=LIMIT)
