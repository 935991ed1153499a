"""Captured graphs on disk: only an equal model may read one, and what it reads is what a capture gives."""

from __future__ import annotations

import copy
import errno
import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama
from transformers.utils import output_capturing

import graft
from graft.base.caches import GRAPHS
from graft.capture.cache import OFF, captured_decoder
from graft.capture.code import Unknowable
from graft.capture.decoder import capture_decoder
from graft.capture.fingerprint import fingerprint
from graft.ir.edit import second_module
from graft.ir.io.text import graph_text
from graft.models.load import load_model
from processes import run_python


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.delenv(GRAPHS.variable)
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    return tmp_path / "graphs"


def llama(dtype="float32", device="meta"):
    return load_model("tiny-llama", dtype=dtype, device=device).module


@cache
def captured() -> tuple[torch.nn.Module, torch.fx.GraphModule, str]:
    """A model and its graph, captured once for the tests of what is stored, and its fingerprint before that."""
    model = llama(device="cpu")
    before = fingerprint(model)
    return model, capture_decoder(model), before


@pytest.fixture
def instant(monkeypatch):
    """The model whose capture takes no time."""
    model, graph, _ = captured()
    for home in ("cache", "layers_once"):  # without a key, and with one
        monkeypatch.setattr(f"graft.capture.{home}.capture_decoder", lambda _: graph)
    return model


@cache
def known() -> str:
    return fingerprint(llama())


def changed(function):
    """The same function of the same Python module, with another constant in it."""
    code, name = function.__code__, function.__name__
    code = code.replace(co_consts=(*code.co_consts, 7))
    other = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    other.__qualname__, other.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    return other


def test_equal_models_have_one_fingerprint():
    assert fingerprint(llama()) == known()
    used, _, before = captured()
    with torch.no_grad():
        used(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert fingerprint(used) == before != known(), "running it changes nothing; the device is part of it"
    elsewhere = llama()
    elsewhere.name_or_path = elsewhere.config._name_or_path = "another folder"
    assert fingerprint(elsewhere) == known(), "a copy has the same graph"


def test_what_the_process_did_with_other_models_does_not_count(monkeypatch):
    """Python notes a class's slots when an object is first copied, transformers every class of models it has made,
    and in a configuration which class was saved."""
    model = llama()
    for cls in type(model.config).__mro__:
        if "__slotnames__" in vars(cls):
            monkeypatch.delattr(cls, "__slotnames__")
    before = fingerprint(model)
    copy.deepcopy(model.config)
    assert "__slotnames__" in vars(type(model.config))
    monkeypatch.setitem(output_capturing._CAN_RECORD_REGISTRY, "another", {"attentions": torch.nn.Linear})
    model.config.architectures = ["LlamaForCausalLM"]
    assert fingerprint(model) == before


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama.LlamaAttention, "forward"),
        (modeling_llama.LlamaRMSNorm, "forward"),
        (modeling_llama.LlamaModel, "__init__"),
        (torch.nn.Linear, "forward"),
        (torch.nn.Module, "__getattr__"),
        (torch.Tensor, "__rpow__"),
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "rotate_half"),
        (modeling_llama, "eager_attention_forward"),
        (torch.nn.functional, "silu"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_other_code_is_another_fingerprint(monkeypatch, owner, name):
    first = known()
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, changed(getattr(function, "__wrapped__", function)))
    assert fingerprint(llama()) != first
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: function(*args, **kwargs))
    with pytest.raises(Unknowable, match="has no version"):
        fingerprint(llama())
    monkeypatch.undo()
    assert fingerprint(llama()) == first


def test_other_defaults_globals_and_helpers_of_helpers_are_another_fingerprint(monkeypatch):
    first, seen = known(), set()
    function = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(getattr(function, "__wrapped__", function), "__defaults__", (2,))
    seen.add(fingerprint(llama()))
    monkeypatch.undo()
    monkeypatch.setattr(modeling_llama, "create_causal_mask", modeling_llama.rotate_half)
    seen.add(fingerprint(llama()))
    monkeypatch.undo()
    masks = sys.modules[modeling_llama.create_causal_mask.__module__]
    monkeypatch.setattr(masks, "causal_mask_function", changed(masks.causal_mask_function))
    seen.add(fingerprint(llama()))
    assert len(seen | {first}) == 4


def test_a_registered_attention_function_is_part_of_it():
    first = known()
    AttentionInterface.register("graft_test", modeling_llama.rotate_half)
    try:
        assert fingerprint(llama()) != first
    finally:
        AttentionInterface._global_mapping.pop("graft_test")
    assert fingerprint(llama()) == first


def settings():
    """One change each of a model that changes, or may change, its graph."""

    def config(model):
        model.config.rms_norm_eps = 3e-3

    def layers(model):
        del model.model.layers[-1]

    def scaling(model):
        model.model.layers[1].self_attn.scaling = 0.3

    def tied(model):
        model.lm_head.weight = model.model.embed_tokens.weight

    def strides(model):
        weight = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(weight.t().contiguous().t())

    def function(model):
        model.model.rotary_emb.rope_init_fn_of_test = modeling_llama.rotate_half

    return {
        "config": config,
        "layers": layers,
        "scaling": scaling,
        "tied": tied,
        "strides": strides,
        "function": function,
        "dtype": lambda model: model.to(torch.float64),
        "one dtype": lambda model: model.model.norm.double(),
        "training": lambda model: model.train(),
        "one training": lambda model: model.model.norm.train(),
        "attention": lambda model: model.set_attn_implementation("eager"),
        "buffer": lambda model: model.register_buffer("more", torch.zeros(1, device="meta")),
    }


@pytest.mark.some(6)
@pytest.mark.parametrize("change", settings().values(), ids=settings())
def test_another_model_is_another_fingerprint(change):
    model = llama()
    assert fingerprint(model) == known()
    change(model)
    assert fingerprint(model) != known()


def test_another_default_dtype_is_another_fingerprint():
    model, first = llama(), known()
    torch.set_default_dtype(torch.float64)
    try:
        assert fingerprint(model) != first
    finally:
        torch.set_default_dtype(torch.float32)


class Foreign(torch.nn.Linear):
    pass


class Special(torch.Tensor):
    pass


def refusals():
    def foreign(model):
        model.lm_head.__class__ = Foreign

    def forward(model):
        model.model.norm.forward = lambda x: x * 2

    def method(model):
        model.model._update_causal_mask = model.model.get_input_embeddings = lambda *a: None

    def subclass(model):
        model.model.rotary_emb.register_buffer("inv_freq", torch.ones(4).as_subclass(Special))

    def tensor(model):
        model.model.factor = torch.ones(3)

    def thing(model):
        model.model.thing = object()

    def user_function(model):
        model.model.thing = lambda: 0

    def nested(model):
        model.model.things = [{"a": object()}]

    hook = lambda *_: None  # noqa: E731
    return {
        "hooks": (lambda model: model.model.norm.register_forward_hook(hook), "norm has hooks"),
        "pre hooks": (lambda model: model.register_forward_pre_hook(hook), "the model has hooks"),
        "class": (foreign, "neither torch's nor transformers'"),
        "forward": (forward, "model.norm has a forward of its own"),
        "method": (method, "has a get_input_embeddings of its own"),
        "tensor class": (subclass, "inv_freq is a Special"),
        "tensor": (tensor, "model.factor is a torch.Tensor"),
        "thing": (thing, "model.thing is a builtins.object"),
        "function": (user_function, "has no version"),
        "nested": (nested, "model.things is a builtins.object"),
    }


@pytest.mark.parametrize(("change", "reason"), refusals().values(), ids=refusals())
def test_what_cannot_be_known_is_not_cached_and_told(monkeypatch, folder, change, reason):
    model = llama()
    change(model)
    monkeypatch.setattr("graft.capture.cache.capture_decoder", lambda given: given)  # not what is looked at
    gm, note = captured_decoder(model)
    assert gm is model and reason in note and "not stored" in note and not folder.exists()


def test_hooks_of_all_modules_and_autocast_are_refused():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(Unknowable, match="hooks are registered"):
            fingerprint(llama())
    finally:
        handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(Unknowable, match="autocast"):
        fingerprint(llama())


START = """
import sys
from graft.capture.cache import captured_decoder
from graft.models.load import load_model
print(captured_decoder(load_model("tiny-llama", dtype="float32", device="cpu").module)[1])
"""


@pytest.mark.exhaustive
def test_a_new_process_reads_it(folder):
    """Both are new: what other tests left in this one (patched functions, say) is part of its fingerprint."""
    notes = [run_python("-c", START).stdout for _ in range(2)]
    (file,) = folder.iterdir()
    assert notes[0].strip().endswith(" s, stored")
    assert notes[1].startswith(f"captured graph: from the cache ({file.stem[:12]})")


def test_broken_files_are_replaced(instant, folder):
    told, model = [], instant
    fresh, note = captured_decoder(model, lambda *what: told.append(what[0]))
    assert note.startswith("captured graph: captured in ") and note.endswith(" s, stored")
    (file,) = folder.iterdir()
    assert told == ["capturing the graph"] and file.name == f"{fingerprint(model)}.json"
    loaded, _ = captured_decoder(model, lambda *what: told.append(what[0]))
    assert told[1:] == ["loading the captured graph"] and type(loaded).__name__ == type(fresh).__name__
    good = file.read_text()
    for broken in (good[:1000], good.replace("aten.mul", "aten.add", 1), "", "{}\n{}", good.replace('"', "", 1)):
        file.write_text(broken)
        again, note = captured_decoder(model)
        assert "s, stored; the stored graph was not used: " in note
        assert graph_text(again.graph) == graph_text(fresh.graph) and file.read_text() == good
    file.write_bytes(b"\xff\xfe\x00")
    assert "UnicodeDecodeError" in captured_decoder(model)[1]


def test_a_file_of_another_model_under_its_name_is_not_used(instant, folder, monkeypatch):
    model, anew = instant, torch.fx.GraphModule({}, torch.fx.Graph())
    captured_decoder(model)
    (file,) = folder.iterdir()
    other = copy.deepcopy(model)
    other.model.layers[0].self_attn.scaling = 0.5
    file.rename(folder / f"{fingerprint(other)}.json")
    monkeypatch.setattr("graft.capture.layers_once.capture_decoder", lambda given: anew if given is other else None)
    gm, note = captured_decoder(other)
    assert "its checksum is not what it says" in note and not list(gm.graph.nodes)  # as the new one


def test_a_full_disk_or_a_folder_that_cannot_be_written_is_a_note(instant, monkeypatch, tmp_path, folder):
    model = instant
    write = Path.write_text

    def full(path, text, *args, **kwargs):
        write(path, text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    _, note = captured_decoder(model)
    assert "not stored: [Errno 28] No space left on device" in note and list(folder.iterdir()) == []
    monkeypatch.setattr(Path, "write_text", write)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "file"))
    assert "not stored: [Errno 20]" in captured_decoder(model)[1]
    monkeypatch.setenv(OFF, "1")
    assert f"not stored ({OFF} is set)" in captured_decoder(model)[1]


def test_a_constant_of_the_graph_is_not_stored(monkeypatch, folder):
    model, graph, _ = captured()
    gm = second_module(graph)  # a deep copy takes 6 core-seconds: torch copies every symbol
    gm.register_buffer("constant", torch.ones(2))
    monkeypatch.setattr("graft.capture.layers_once.capture_decoder", lambda _: gm)
    assert "not stored: constant is neither a parameter nor a buffer" in captured_decoder(model)[1]
    assert not folder.exists()


@pytest.mark.exhaustive
def test_the_engine_tells_where_its_graph_came_from():
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    params = graft.SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (graft.LLM(model, max_num_seqs=2, backend="eager") for _ in range(2))
    assert "stored" in first.report.notes[0] and "from the cache" in second.report.notes[0]
    assert first.generate([[5, 6, 7]], params)[0].token_ids == second.generate([[5, 6, 7]], params)[0].token_ids
    weights = {id(parameter) for parameter in model.module.parameters()}
    kept = [name for name, parameter in second.graph_module.named_parameters() if id(parameter) in weights]
    assert kept == [name for name, parameter in first.graph_module.named_parameters() if id(parameter) in weights]
