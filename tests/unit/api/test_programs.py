"""graft.compile of what torch.export gives: sizes, state, names and results are those of the program."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import convert_and_export_with_cache

import graft
from graft.base.errors import CaptureError, GuardFailed, UsageError
from marks import examples


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.w = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, *, scale=None, more=()):
        self.steps.add_(1)
        h = self.linear(x)
        y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w
        return {"y": y * (1 if scale is None else scale) + sum(more), "steps": self.steps + 0}


def exported(strict=False, decomposed=False, stored=False):
    module = Counting().requires_grad_(False)
    reference = copy.deepcopy(module)  # whose buffer is its own
    sizes = {"x": {0: Dim("batch", min=1, max=64)}, "scale": None, "more": [None, None]}
    kwargs = {"scale": torch.ones(8), "more": [torch.zeros(8), torch.ones(8)]}
    program = torch.export.export(module, (torch.randn(3, 8),), kwargs, dynamic_shapes=sizes, strict=strict)
    if decomposed:
        program = program.run_decompositions()
    if stored:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    return reference, program


@settings(max_examples=examples(16))
@given(strict=st.booleans(), decomposed=st.booleans(), stored=st.booleans(), batch=st.integers(1, 64))
def test_a_program_however_it_was_exported(strict, decomposed, stored, batch):
    module, program = exported(strict, decomposed, stored)
    compiled = graft.compile(program)
    assert len(compiled.report.transforms["fuse_rms_norm"].matches) == 1
    assert [(alias.input, alias.kind) for alias in compiled.aliases] == [("steps", "user")]
    assert any(note.startswith("captured by torch.export") for note in compiled.report.notes)
    x, scale, more = torch.randn(batch, 8), torch.randn(8), [torch.randn(8), torch.randn(8)]
    before = float(program.state_dict["steps"])
    for call in (1, 2):
        got, expected = compiled(x, more=more, scale=scale), module(x, scale=scale, more=more)
        torch.testing.assert_close(got["y"], expected["y"])
        assert float(got["steps"]) == before + call == float(compiled.steps)
    compiled.reset()
    assert float(compiled.steps) == before


def test_calls_that_the_program_is_not_for():
    _, program = exported()
    compiled = graft.compile(program)
    kwargs = {"scale": torch.ones(8), "more": [torch.zeros(8), torch.ones(8)]}
    with pytest.raises(UsageError, match="dim 0 of x is 65, but the graph is for sizes from 1 to 64"):
        compiled(torch.randn(65, 8), **kwargs)
    with pytest.raises(UsageError, match=r"keyword arguments \['scale', 'more'\]"):
        compiled(torch.randn(3, 8))
    with pytest.raises(UsageError, match="leave out dynamic_shapes"):
        graft.compile(program, dynamic_shapes={"x": None})
    with pytest.raises(UsageError, match="which an ExportedProgram does not have"):
        graft.compile(program, grad="honour")


def test_a_path_that_was_not_exported_is_refused():
    class Branches(nn.Module):
        def forward(self, x):
            return x.sum(0) if x.shape[0] > 4 else x * 2

    program = torch.export.export(Branches(), (torch.ones(6),), dynamic_shapes={"x": {0: Dim.AUTO}}, strict=False)
    compiled = graft.compile(program)
    torch.testing.assert_close(compiled(torch.ones(7)), torch.tensor(7.0))
    with pytest.raises(UsageError) as error:
        compiled(torch.ones(3))
    assert not isinstance(error.value, GuardFailed) and "3" in str(error.value)


@pytest.mark.some(1)
@pytest.mark.parametrize("strict", [False, True])
def test_hugging_face_programs_with_a_static_cache(strict, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64)).eval().requires_grad_(False)
    cache = {"batch_size": 1, "max_cache_len": 16}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    program = convert_and_export_with_cache(model, torch.tensor([[3]]), torch.tensor([0]), strict=strict)
    compiled = graft.compile(program)
    assert len(compiled.report.transforms["fuse_attention"].matches) == 2
    kinds = [(alias.input.rpartition(".")[2], alias.kind) for alias in compiled.aliases]
    assert sorted(name for name, kind in kinds if kind == "kv_cache_update") == sorted(
        f"{name}_cache_{layer}" for name in ("key", "value") for layer in (0, 1)
    )
    tokens = [3, 5, 7, 9]
    expected = model(torch.tensor([tokens])).logits
    got = [compiled(input_ids=torch.tensor([[t]]), cache_position=torch.tensor([i])) for i, t in enumerate(tokens)]
    torch.testing.assert_close(torch.cat(got, 1), expected)
    compiled.reset()
    compiled.save(tmp_path / "saved")
    again = graft.load(tmp_path / "saved")(input_ids=torch.tensor([[3]]), cache_position=torch.tensor([0]))
    torch.testing.assert_close(again, expected[:, :1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_torch(kind):
    """They list their weights once more and make that list anew when a weight is another, as every trace has it."""
    module, x = kind(4, 8, 2, bidirectional=True).requires_grad_(False), torch.randn(5, 2, 4)
    held = list(module._flat_weights)
    compiled = graft.compile(module, (x,))
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    assert all(a is b for a, b in zip(held, module._flat_weights, strict=True))
    module.weight_hh_l1.fill_(0.5)  # weights that the graph reads, not copies
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)


def test_a_list_that_gets_other_tensors_is_refused():
    class Relisted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))]

        def forward(self, x):
            self.weights = self.weights[::-1]
            return x + self.weights[0]

    with pytest.raises(CaptureError, match="forward sets weights"):
        graft.compile(Relisted(), (torch.ones(2),))


def test_compiled_modules_of_torch_and_of_graft_are_taken_as_what_they_were_made_of():
    inner, x = nn.Sequential(nn.Linear(4, 4), nn.SiLU()).requires_grad_(False), torch.randn(2, 4)
    own = graft.compile(inner, (x,))
    for module in (torch.compile(inner), own, nn.Sequential(torch.compile(inner)), nn.Sequential(own)):
        compiled = graft.compile(module, (x,))
        torch.testing.assert_close(compiled(x), inner(x))
        assert "linear" in [node.name for node in compiled.graph_module.graph.nodes]


def test_state_of_a_compiled_submodule_is_written_once():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps.add_(1)
            return x * self.steps

    inner = Steps()
    compiled = graft.compile(nn.Sequential(graft.compile(inner, (torch.ones(2),))), (torch.ones(2),))
    assert inner.steps == 0
    torch.testing.assert_close([compiled(torch.ones(2)) for _ in range(2)], [torch.ones(2), torch.full((2,), 2.0)])
    assert inner.steps == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 4))])
def test_torchscript_is_refused_by_name(make):
    module = make(nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"it is a \w+ of TorchScript"):
        graft.compile(module, (torch.ones(1, 4),))
    with pytest.raises(UsageError, match=r"the module 1 is a \w+ of TorchScript"):
        graft.compile(nn.Sequential(nn.ReLU(), module), (torch.ones(1, 4),))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_by_name(layout):
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    with pytest.raises(CaptureError, match="rows is a nested tensor"):
        graft.compile(lambda rows: rows * 2, (rows,))
