"""Objects that hold tensors, as inputs and as results: dataclasses, named tuples, mappings of other classes."""

from __future__ import annotations

import collections
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import graft
from graft.base.errors import ArtifactError, CaptureError, CaptureRefused, UsageError

Pair = collections.namedtuple("Pair", "a b")


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor
    scale: int = 3
    more: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    pair: Pair


@dataclass(slots=True)
class Slots:
    x: torch.Tensor


@dataclass
class Out:
    y: torch.Tensor
    parts: tuple


class Model(nn.Module):
    def forward(self, batch, *, frozen=None):
        extra = sum(batch.more) if batch.more else 0
        y = batch.ids * batch.scale + batch.mask + extra
        return Out(y, (Frozen(Pair(y * 2, frozen.pair.a if frozen is not None else None)), {"s": Slots(y + 1)}))


def sample(n, more):
    return Batch(torch.randn(n), torch.randn(n), 2, [torch.randn(n) for _ in range(more)])


def same(got, expected):
    assert type(got) is type(expected)
    torch.testing.assert_close(got.y, expected.y)
    (left, right), (left_, right_) = got.parts, expected.parts
    assert type(left) is type(left_) and type(left.pair) is Pair and type(right["s"]) is Slots
    torch.testing.assert_close((left.pair.a, right["s"].x), (left_.pair.a, right_["s"].x))
    assert (left.pair.b is None) == (left_.pair.b is None)


@settings(max_examples=6)
@given(more=st.integers(0, 2), named=st.booleans(), frozen=st.booleans())
def test_objects_in_and_out(more, named, frozen):
    kwargs = {"frozen": Frozen(Pair(torch.randn(4), torch.randn(4)))} if frozen else {}
    example = ((), {"batch": sample(4, more), **kwargs}) if named else ((sample(4, more),), kwargs)
    compiled = graft.compile(Model(), *example)
    batch = sample(4, more)
    same(compiled(batch, **kwargs), Model()(batch, **kwargs))
    same(compiled(batch=batch, **kwargs), Model()(batch, **kwargs))


def test_sizes_of_what_an_object_holds():
    sizes = {"batch": {"ids": {0: Dim.AUTO}, "mask": {0: Dim.AUTO}, "more": [{0: Dim.AUTO}]}}
    compiled = graft.compile(Model(), (sample(4, 1),), dynamic_shapes=sizes)
    batch = sample(7, 1)
    same(compiled(batch), Model()(batch))
    assert [leaf.name for leaf in compiled.variants[0].signature.leaves][:2] == ["batch.ids", "batch.mask"]


def test_other_objects_are_refused():
    compiled = graft.compile(Model(), (sample(4, 1),))
    with pytest.raises(UsageError, match="argument 0 was a Batch when it was compiled, and is a Slots"):
        compiled(Slots(torch.zeros(4)))
    with pytest.raises(UsageError, match=r"batch\.more"):
        compiled(sample(4, 2))
    with pytest.raises(UsageError, match=r"batch\.scale is 5, but 2 is fixed in the graph"):
        compiled(Batch(torch.zeros(4), torch.zeros(4), 5, [torch.zeros(4)]))


def test_an_object_that_forward_changes_is_refused():
    def program(batch):
        batch.ids = batch.ids + 1
        return batch.ids

    with pytest.raises(CaptureError, match=r"changes the argument .*ids"):
        graft.compile(program, (sample(4, 0),))


def test_tensors_in_objects_are_written_in_place():
    def program(batch):
        batch.ids.add_(batch.mask)
        return batch.ids.sum()

    batch = sample(4, 0)
    compiled = graft.compile(program, (batch,))
    expected = batch.ids + batch.mask
    compiled(batch)
    torch.testing.assert_close(batch.ids, expected)
    assert [alias.input for alias in compiled.aliases] == ["batch.ids"]


def test_mappings_of_other_classes():
    output, encoding = BaseModelOutput(last_hidden_state=torch.ones(3)), BatchEncoding({"ids": torch.ones(3)})

    def program(output, encoding):
        return output.last_hidden_state + encoding["ids"], BatchEncoding({"z": encoding.ids})

    total, returned = graft.compile(program, (output, encoding))(output, encoding)
    torch.testing.assert_close(total, torch.full((3,), 2.0))
    assert type(returned) is BatchEncoding and returned.z is encoding.ids


def test_gradients_go_through_objects():
    batch = Batch(torch.randn(4, requires_grad=True), torch.randn(4), 2, [])
    compiled = graft.compile(Model(), (batch,), grad="honour")
    compiled(batch).parts[1]["s"].x.sum().backward()
    torch.testing.assert_close(batch.ids.grad, torch.full((4,), 2.0))


def test_a_saved_module_takes_and_returns_the_same_objects(tmp_path):
    graft.compile(Model(), (sample(4, 1),)).save(tmp_path / "saved")
    batch = sample(4, 1)
    same(graft.load(tmp_path / "saved")(batch), Model()(batch))

    @dataclass
    class Local:
        x: torch.Tensor

    with pytest.raises(ArtifactError, match="Local cannot be found by its name"):
        graft.compile(lambda x: Local(x + 1), (torch.ones(2),)).save(tmp_path / "local")


def test_sizes_of_what_takes_any_keyword():
    class Keywords(nn.Module):
        def forward(self, x, **others):
            return x + others["a"] * others.get("b", 1)

    sizes = {name: {0: Dim.AUTO} for name in ("x", "a", "b")}
    kwargs = {"a": torch.ones(3), "b": torch.ones(3)}
    compiled = graft.compile(Keywords(), (torch.ones(3),), kwargs, dynamic_shapes=sizes)
    torch.testing.assert_close(compiled(torch.ones(5), b=torch.ones(5), a=torch.ones(5)), torch.full((5,), 2.0))


def test_a_replay_of_sparse_tensors_is_refused():
    a = torch.eye(4).to_sparse_csr()
    with pytest.raises(CaptureRefused, match=r"%a is torch.sparse_csr, which has no one address .*backend='eager'"):
        graft.compile(lambda a, x: a @ x, (a, torch.ones(4, 4)), backend="cuda_graph")


@pytest.mark.parametrize("kind", ["sparse_csr", "sparse_csc", "sparse_coo", "sparse_bsr"])
def test_sparse_inputs_and_buffers(kind):
    options = {"layout": getattr(torch, kind)} | ({"blocksize": (2, 2)} if kind == "sparse_bsr" else {})

    def make():
        return (torch.randn(4, 4) > 0).float().to_sparse(**options)

    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("own", make())

        def forward(self, a, x):
            if kind == "sparse_bsr":  # torch multiplies blocks with MKL alone, which ARM has not
                return a.to_dense() @ x + self.own.to_dense() @ x
            return a @ x + self.own @ x

    module, x = Times(), torch.randn(4, 4)
    compiled = graft.compile(module, (make(), x))
    for _ in range(2):
        a = make()
        torch.testing.assert_close(compiled(a, x), module(a, x))
    with pytest.raises(UsageError, match=f"input a is torch.strided, but was torch.{kind}"):
        compiled(torch.randn(4, 4), x)


def test_keys_that_are_no_texts_are_saved(tmp_path):
    x = torch.ones(3)
    compiled = graft.compile(lambda d: {key: value + key for key, value in d.items()}, ({1: x, 0: x},))
    compiled.save(tmp_path / "saved")
    for module in (compiled, graft.load(tmp_path / "saved")):
        result = module({1: x, 0: x * 2})
        assert list(result) == [1, 0]
        torch.testing.assert_close((result[0], result[1]), (x * 2, x + 1))


def test_what_cannot_be_taken_apart_is_refused_by_name():
    with pytest.raises(CaptureError, match=r"queue\[0\] is a deque, which a graph cannot take; pass a list"):
        graft.compile(lambda queue: queue[0][0], ([deque([torch.ones(2)])],))
    with pytest.raises(UsageError, match=r"ReLU is a class; compile an object of it"):
        graft.compile(nn.ReLU, (torch.ones(2),))
