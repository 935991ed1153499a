"""Compiled engines: what was saved is what starts, in another process too, and nothing is compiled for it."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import graft
from conftest import tiny
from graft.base.errors import ArtifactError, DiskFull, UsageError
from graft.base.kernel_cache import Recorder, seed
from graft.base.manifest import OpenFolder, checksum, write_manifest
from graft.cli.app import app
from graft.engine.artifact import load as loading
from graft.engine.artifact import part as writing
from graft.engine.artifact.format import ENGINE, is_engine
from graft.engine.artifact.tokenizer import StoredTokenizer
from graft.ir.io.serial import graph_to_json
from graft.models.load import load_model
from graft.ops.fused_linear import choice
from graft.ops.fused_linear.kinds import LinearShape

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
PARAMS = graft.SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
SMALL = {"kv_cache_memory": "8MiB"}


def letters() -> PreTrainedTokenizerFast:
    """A token for each letter and for the blank."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{chr(97 + i): 3 + i for i in range(26)}, " ": 29}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


@pytest.fixture(scope="module")
def model():
    from dataclasses import replace

    return replace(tiny("llama"), tokenizer=letters())


@pytest.fixture(scope="module")
def llm(model):
    return graft.LLM(model, backend="native", **SMALL)


@pytest.fixture(scope="module")
def folder(llm, tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "llama"
    llm.save(path)
    return path


@pytest.fixture(scope="module")
def again(folder):
    return graft.LLM(folder, **SMALL)


def answers(llm, prompts=PROMPTS):
    outputs = llm.generate(prompts, PARAMS)
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_the_same_answers_to_the_bit(llm, again):
    assert answers(again) == answers(llm)
    assert (again.backend, again.device, again.model.name) == (llm.backend, llm.device, llm.model.name)
    assert again.model.family == llm.model.family and again.model.context == llm.model.context


def test_what_is_wrong_with_another_weight_would_be_seen(model, llm, tmp_path):
    """The comparison above can fail: one row of one weight makes other answers."""
    other = load_model("tiny-llama", dtype="float32", device="cpu")
    with torch.no_grad():
        other.module.model.layers[0].mlp.down_proj.weight[0] += 0.5
    graft.LLM(other, backend="native", **SMALL).save(tmp_path / "other")
    assert answers(graft.LLM(tmp_path / "other", **SMALL)) != answers(llm)


def test_report_and_graph_are_those_of_the_build(llm, again):
    before, after = llm.report, again.report
    assert {n: (r.status, len(r.matches)) for n, r in after.transforms.items()} == {
        n: (r.status, len(r.matches)) for n, r in before.transforms.items()
    }
    assert after.kernels == before.kernels
    assert any("nothing was compiled" in note for note in after.notes)
    assert [n.name for n in again.graph_module.graph.nodes] == [n.name for n in llm.graph_module.graph.nodes]
    sizes = {str(n.target): tuple(n.meta["val"].shape) for n in llm.graph_module.graph.nodes if n.op == "get_attr"}
    state = dict(again.graph_module.named_parameters())
    assert {name: tuple(state[name].shape) for name in sizes if name in state} == sizes


def test_tokens_text_and_chats_are_those_of_the_model(llm, again):
    assert isinstance(again.tokenizer, StoredTokenizer)
    for text in ("hello world", "", "a b!"):
        assert again.encode(text) == llm.encode(text)
    for name in ("chat_template", "special_tokens_map"):
        assert getattr(again.tokenizer, name) == getattr(llm.tokenizer, name)
    assert "own" not in vars(again.tokenizer)
    chat = [{"role": "user", "content": "hi there"}]
    assert again.chat_prompt(chat) == llm.chat_prompt(chat)
    params = graft.SamplingParams(max_tokens=5, ignore_eos=True)
    assert again.generate("abc", params)[0].text == llm.generate("abc", params)[0].text
    assert again.tokenizer.eos_token == "</s>" and "own" in vars(again.tokenizer)


@pytest.mark.parametrize(
    ("backend", "config"),
    [("eager", None), ("native", {"kernels": {"rope_attention": "reference"}})],
    ids=["eager", "native with eager nodes"],
)
def test_graphs_that_do_not_run_natively_alone(model, backend, config, tmp_path):
    llm = graft.LLM(model, backend=backend, config=config, **SMALL)
    llm.save(tmp_path / "engine")
    again = graft.LLM(tmp_path / "engine", **SMALL)
    assert again.backend == backend and answers(again) == answers(llm)
    if backend == "native":
        assert json.loads((tmp_path / "engine" / "manifest.json").read_text())["native"]["eager"]


def test_quantized_weights_are_stored_as_kernels_read_them(model, again, llm, tmp_path):
    """Two engines in one process have their own code: the dynamic loader knows a library by its name, which must not
    be that of one that was loaded before."""
    quantized = graft.LLM(model, backend="native", quantize="int8", **SMALL)
    quantized.save(tmp_path / "engine")
    stored_one = graft.LLM(tmp_path / "engine", **SMALL)
    assert stored_one.quantized == quantized.quantized
    assert answers(stored_one) == answers(quantized) != answers(llm) == answers(again)
    stored = (tmp_path / "engine" / "weights.safetensors").stat().st_size
    assert stored < sum(p.nbytes for p in model.module.parameters())


def test_the_same_build_gives_the_same_bytes(model, folder, tmp_path):
    graft.LLM(model, backend="native", **SMALL).save(tmp_path / "engine")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert "manifest.json" in names and "native/step.so" in names
    same, other, missing = filecmp.cmpfiles(folder, tmp_path / "engine", names, shallow=False)
    assert (sorted(same), other, missing) == (names, [], [])


def test_another_graph_gives_another_folder(folder, tmp_path):
    """`a - b` and `b - a` are two graphs: the order of arguments is part of what is stored."""

    def text(swapped):
        graph = torch.fx.Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (b, a) if swapped else (a, b)),))
        return graph_to_json(torch.fx.GraphModule({}, graph))

    assert text(False) != text(True)


def test_prompts_that_are_run_for_their_kernels_leave_the_engine_as_it_is(llm):
    """What a GPU's engine does before its kernels are stored."""
    steps = llm.engine.scheduler.clock
    writing.run_prompts(llm.parts)
    assert llm.engine.scheduler.clock >= steps + 2 * len(writing.PROMPTS) - 4 and llm.engine.idle
    assert answers(graft.LLM(llm.model, backend="native", **SMALL)) == answers(llm)


def test_kernels_and_measurements_come_before_those_that_are_here(folder, tmp_path, monkeypatch):
    """What a start on a GPU does first, on a folder that has both."""
    shutil.copytree(folder, tmp_path / "engine")
    (tmp_path / "engine" / "kernels" / "KEY").mkdir(parents=True)
    (tmp_path / "engine" / "kernels" / "KEY" / "k.cubin").write_bytes(b"code")
    entry = {"device": "NVIDIA H200", "tokens": {"1": {"kind": "matvec", "rows": 2, "warps": 8, "us": 1.0}}}
    (tmp_path / "tuned.json").write_text(json.dumps({"plain 77x64": entry}))
    writing.write_tuned(tmp_path / "tuned.json", tmp_path / "engine" / "tuned.json")
    about = json.loads((folder / "manifest.json").read_text())
    write_manifest(tmp_path / "engine", {**about, "launcher_platform": "x86_64,Linux,64bit,ELF"}, ENGINE)
    platforms: list[str] = []
    monkeypatch.setattr(loading, "adopt_platform", platforms.append)
    monkeypatch.setattr(choice, "OVERRIDES", [])
    monkeypatch.setattr(loading, "record", Recorder)
    monkeypatch.setattr(loading, "seed", partial(seed, home=tmp_path / "triton"))
    opened = OpenFolder(tmp_path / "engine", ENGINE)
    try:
        assert loading.seed_kernels(opened) == 1
    finally:
        opened.close()
    assert (tmp_path / "triton" / "KEY" / "k.cubin").read_bytes() == b"code" and len(platforms) == 1
    shape = LinearShape.parse("plain 77x64")
    assert choice.current_table("NVIDIA H200")[shape][1].how.warps == 8
    choice.forget()


# ── zero compilation ────────────────────────────────────────────────────────────────────────────────────────────

START = """
import sys
counts = {"processes": 0, "exports": 0}
def hook(event, _):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "os.fork", "os.forkpty"):
        counts["processes"] += 1
sys.addaudithook(hook)
import torch, torch.export
def counting(name, function):
    def call(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)
    return call
torch.export.export = counting("exports", torch.export.export)
import graft
llm = graft.LLM(sys.argv[1], kv_cache_memory="8MiB")
(output,) = llm.generate([[3, 1, 4]], graft.SamplingParams(max_tokens=4, ignore_eos=True))
heavy = [name for name in ("transformers", "torch._dynamo", "torch._inductor", "triton", "sympy",
    "graft.capture.decoder", "graft.passes.pipeline", "graft.backends.native.compiler") if name in sys.modules]
print(counts, heavy, output.token_ids)
if sys.argv[2:]:
    graft.LLM(sys.argv[2], backend="native", device="cpu", kv_cache_memory="8MiB", progress=print)
    print(counts)
"""


@pytest.mark.exhaustive  # the short run: test_kept_engines.py
def test_a_start_compiles_and_captures_nothing(llm, folder, tmp_path):
    """A new process without a compiler on its path starts no program, exports nothing and imports no part of a
    compiler; building the same model in it afterwards is seen by the same counters."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PATH", "TRITON_INTERPRET")}
    environment |= {"PATH": str(tmp_path), "GRAFT_CACHE_DIR": str(tmp_path), "GRAFT_GRAPH_CACHE_DIR": str(tmp_path)}
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    environment["GRAFT_NATIVE_CACHE_DIR"] = str(tmp_path / "native")
    command = [sys.executable, "-c", START, str(folder), "tiny-llama"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    lines = done.stdout.splitlines()
    (expected,) = llm.generate([[3, 1, 4]], graft.SamplingParams(max_tokens=4, ignore_eos=True))
    assert lines[0] == f"{{'processes': 0, 'exports': 0}} [] {expected.token_ids}", done.stderr[-2000:]
    assert not list((tmp_path / "native").glob("*")) or "capturing" in done.stdout
    assert "CompilerFailed" in done.stderr  # the counters' own proof: here it captures, and calls the compiler
    assert "capturing the graph" in done.stdout


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dtype": "bfloat16"}, "dtype=float32"),
        ({"backend": "eager"}, "backend=native"),
        ({"quantize": "int8"}, "quantize has no effect"),
        ({"config": {"verify": "matches"}}, "config has no effect"),
        ({"keep_weights": True}, "no Hugging Face module"),
        ({"kv_cache_dtype": "fp8"}, "not fp8"),
        ({"max_model_len": 10**6}, "context"),
        ({"device": "nowhere"}, "unknown device"),
    ],
)
def test_what_was_not_compiled_is_not_given(folder, asked, told):
    with pytest.raises(UsageError, match=told):
        graft.LLM(folder, **asked)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("torch", "2.9.0", rf"torch was 2\.9\.0, here it is {torch.__version__}".replace("+", r"\+")),
        ("graft", "0.0.1", r"graft was 0\.0\.1"),
        ("machine", "pdp11", "the machine was pdp11"),
        ("cpu", "flags : fpu amx9", "here lacks amx9"),
        ("sources", "0", "graft's sources have changed since"),
        ("gpu", "NVIDIA H200", "the GPU was NVIDIA H200, here it is not needed"),
    ],
)
def test_another_place_is_told_by_what_differs(folder, tmp_path, name, value, told):
    shutil.copytree(folder, tmp_path / "engine")
    sign(tmp_path / "engine", built_for={name: value})
    with pytest.raises(ArtifactError, match=told) as refused:
        graft.LLM(tmp_path / "engine")
    assert "Load the model itself, and save it again" in str(refused.value)  # a program saved it
    sign(tmp_path / "engine", made_by=["compile", "tiny-llama"])
    with pytest.raises(ArtifactError) as refused:
        graft.LLM(tmp_path / "engine")
    assert f"graft compile tiny-llama -o {tmp_path / 'engine'} --overwrite" in str(refused.value)


def sign(folder, **changes):
    """The manifest with other values, as somebody else's graft would have written it."""
    content = json.loads((folder / "manifest.json").read_text())
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    (folder / "manifest.json").write_text(json.dumps(content | {"sha256": checksum(content)}))


def test_another_place_is_recompiled_where_that_is_asked_for(folder, llm, tmp_path):
    shutil.copytree(folder, tmp_path / "engine")
    sign(tmp_path / "engine", built_for={"torch": "2.9.0"}, made_by=["compile", "tiny-llama", "--backend=native"])
    again = graft.LLM(tmp_path / "engine", recompile=True, **SMALL)
    (note,) = [note for note in again.report.notes if note.startswith("recompiled")]
    assert "torch was 2.9.0" in note and note.endswith("as by graft compile tiny-llama --backend=native")
    assert answers(again) == answers(llm)
    plain = graft.LLM(tmp_path / "engine", recompile=True, **SMALL)  # which is for this place by now
    assert answers(plain) == answers(llm) and not any("recompiled" in note for note in plain.report.notes)


def test_what_cannot_be_recompiled_is_told(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "engine")
    unknown = (["compile", "m", "--color=red"], "no option of graft compile")
    for made_by, told in (unknown, (["compile"], "unpack"), ([], "a program saved it")):
        sign(tmp_path / "engine", built_for={"torch": "2.9.0"}, made_by=made_by)
        with pytest.raises(ArtifactError, match=told):
            graft.LLM(tmp_path / "engine", recompile=True)


def test_an_engine_for_a_gpu_says_that_there_is_none(folder, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    shutil.copytree(folder, tmp_path / "engine")
    sign(tmp_path / "engine", device="cuda:0")
    with pytest.raises(UsageError, match="no GPU is available"):
        graft.LLM(tmp_path / "engine")


@pytest.mark.parametrize("name", ["native/step.so", "weights.safetensors", "tokenizer/tokenizer.json", "graph.json"])
def test_a_changed_byte_is_found_before_anything_runs(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path / "engine")
    with (tmp_path / "engine" / name).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ArtifactError, match=f"{name}: was changed after it was saved"):
        graft.LLM(tmp_path / "engine")


def test_the_command_line_refuses_in_one_line(folder, tmp_path, capfd):
    shutil.copytree(folder, tmp_path / "engine")
    os.truncate(tmp_path / "engine" / "weights.safetensors", 100)
    for arguments, told in (
        (["run", "a", "-m", str(tmp_path / "engine")], "is truncated: 100 bytes"),
        (["compile", str(folder), "-o", str(tmp_path / "new")], "is a compiled engine already"),
        (["compile", "tiny-llama", "-o", str(folder)], "--overwrite"),
        (["run", "a", "-m", str(folder), "--set", "verify=matches"], "config has no effect"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(arguments)
        assert ended.value.code in (1, 2) and told in " ".join(capfd.readouterr().err.split())


def test_the_module_says_that_it_is_not_there(again):
    with pytest.raises(UsageError, match="no Hugging Face module"):
        again.model.module(torch.tensor([[1]]))


def test_only_what_was_built_here_can_be_saved(again, model, tmp_path):
    with pytest.raises(ArtifactError, match="copy that folder"):
        again.save(tmp_path / "engine")
    assert not list(tmp_path.iterdir())


def test_foreign_folders_and_files_stay(llm, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, told in (("mine", "notes.txt"), ("file", "is a file")):
        with pytest.raises(ArtifactError, match=told):
            llm.save(tmp_path / name, overwrite=True)
    with pytest.raises(ArtifactError, match="already"):
        llm.save(folder)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine" and not is_engine(tmp_path / "mine")


def test_a_full_disk_leaves_nothing(llm, tmp_path, monkeypatch):
    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    llm.save(tmp_path / "engine")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "engine").iterdir()}
    monkeypatch.setattr(writing, "write_mapped", full)
    for name in ("engine", "new"):
        with pytest.raises(DiskFull, match="nothing was left behind"):
            llm.save(tmp_path / name, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"engine"}
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "engine").iterdir()} == before


def test_an_engine_is_replaced_whole(llm, tmp_path):
    llm.save(tmp_path / "engine")
    inode = (tmp_path / "engine").stat().st_ino
    llm.save(tmp_path / "engine", overwrite=True)
    assert (tmp_path / "engine").stat().st_ino != inode and [p.name for p in tmp_path.iterdir()] == ["engine"]
    assert answers(graft.LLM(Path(tmp_path / "engine"), **SMALL)) == answers(llm)
