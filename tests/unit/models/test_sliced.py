"""A folder's model without its numbers: names, ties and experts of a usual load, and parts that are read later."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.base.errors import CheckpointError
from graft.models.load import load_model
from graft.models.sliced import slices_problem, weight_files

FAMILIES = ("llama", "qwen3-moe", "gpt2", "cohere", "gpt-oss")  # plain; experts joined; [in, out]; tied; transposed


def saved(folder, family, dtype=torch.float32, size="20KB"):
    module = load_model(f"tiny-{family}", dtype="float32", device="cpu").module.to(dtype)
    module.save_pretrained(folder, max_shard_size=size)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_that_of_a_usual_load(tmp_path, family):
    folder = saved(tmp_path, family)
    assert len(weight_files(folder)) > 3
    expected, made = (load_model(folder, dtype="float32", device="cpu", ranks=ranks) for ranks in (1, 2))
    assert expected.lazy is None and made.lazy is not None and made.lazy.taken == 0
    assert made.notes == expected.notes
    wanted, found = (dict(m.module.named_parameters(remove_duplicate=False)) for m in (expected, made))
    assert list(found) == list(wanted)
    for name, parameter in found.items():
        assert parameter in made.lazy and not parameter.any(), "never written"
        assert [name == other for other in found if found[other] is parameter] == [
            name == other for other in wanted if wanted[other] is wanted[name]
        ]
    for name, parameter in made.module.named_parameters():
        made.lazy.fill(parameter.data)
        assert torch.equal(parameter, wanted[name]), name
    for (name, one), (_, other) in zip(made.module.named_buffers(), expected.module.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert made.module.generation_config.to_dict() == expected.module.generation_config.to_dict()


def test_another_dtype_is_converted_where_it_is_read(tmp_path):
    folder = saved(tmp_path, "llama", torch.bfloat16)
    expected, made = (load_model(folder, dtype="float32", device="cpu", ranks=ranks) for ranks in (1, 2))
    name = "model.layers.0.mlp.down_proj.weight"
    one, other = (m.module.get_parameter(name) for m in (expected, made))
    part, _ = made.lazy.part(other.data, 1, [(32, 64)])
    made.lazy.fill(part)
    assert part.dtype is torch.float32 and torch.equal(part, one[:, 32:]) and made.lazy.taken == part.numel() * 2


def test_memory_without_bytes_is_filled_as_well(tmp_path, monkeypatch):
    """As on a GPU, where no pages can be promised: a storage of no bytes."""

    def bare(shape, dtype, device):
        made = torch.empty(tuple(shape), dtype=dtype, device=device)
        made.untyped_storage().resize_(0)
        return made

    for home in ("graft.models.sliced", "graft.weights.lazy"):
        monkeypatch.setattr(f"{home}.hollow", bare)
    folder = saved(tmp_path, "llama")
    made = load_model(folder, dtype="float32", device="cpu", ranks=2)
    assert sum(p.untyped_storage().nbytes() for p in made.module.parameters()) == 0
    weight = made.module.model.layers[0].mlp.down_proj.weight
    part, _ = made.lazy.part(weight.data, 0, [(0, 16)])
    made.lazy.fill(part)
    assert torch.equal(
        part, load_model(folder, dtype="float32", device="cpu").module.model.layers[0].mlp.down_proj.weight[:16]
    )
    assert weight.untyped_storage().nbytes() == 0


def test_what_must_be_read_whole_is_told(tmp_path):
    folder = saved(tmp_path, "llama", size="1GB")
    assert slices_problem(folder) is None and [path.name for path in weight_files(folder)] == ["model.safetensors"]
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    made = load_model(folder, dtype="float32", device="cpu", ranks=2)
    assert made.lazy is None
    assert any("every rank read all of" in note and "no safetensors files" in note for note in made.notes)
    assert torch.equal(made.module.lm_head.weight, state["lm_head.weight"])


def test_code_and_quantization_are_read_whole(tmp_path):
    folder = saved(tmp_path, "llama", size="1GB")
    config = json.loads((folder / "config.json").read_text())
    for more, why in (
        ({"quantization_config": {"quant_method": "fp8"}}, "it is quantized"),
        ({"auto_map": {"AutoConfig": "x.X"}}, "code of its own"),
    ):
        (folder / "config.json").write_text(json.dumps(config | more))
        assert why in slices_problem(folder)


@pytest.mark.parametrize("change", ["missing", "shape", "left over"])
def test_wrong_weights_are_refused_as_ever(tmp_path, change):
    folder = saved(tmp_path, "llama", size="1GB")
    state, norm = load_file(folder / "model.safetensors"), "model.norm.weight"
    if change == "shape":
        state[norm] = torch.ones(7)
    elif change == "missing":
        state["other.weight"] = state.pop(norm)
    else:
        state["other.weight"] = torch.ones(3)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    said = []
    for ranks in (1, 2):
        with pytest.raises(CheckpointError) as told:
            load_model(folder, dtype="float32", device="cpu", ranks=ranks)
        said.append(str(told.value))
    assert said[0] == said[1]
