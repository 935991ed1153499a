"""The stages between a checkpoint and an engine: each gives a record; what cannot be is told before a load."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graft import LLM
from graft.base.errors import UsageError
from graft.base.progress import CAPTURE, LOWERING, TRANSFORMS, phase_of
from graft.engine.setup import stages
from graft.models.load import load_model


def refuse_loading(*_, **__):
    raise AssertionError("the model was loaded")


def test_the_engine_captures_its_own_cuda_graphs(monkeypatch):
    monkeypatch.setattr(stages, "load_model", refuse_loading)
    with pytest.raises(UsageError, match=r"the engine captures its own CUDA graphs.*leave out backend"):
        LLM("tiny-llama", backend="cuda_graph")


def test_the_command_line_and_llm_load_alike(monkeypatch):
    from graft.cli.load import load_llm

    asked = []
    monkeypatch.setattr(stages, "load_model", lambda *_, **options: asked.append(options) or load_model("tiny-llama"))
    one = load_llm("tiny-llama", lambda *_: None, sets=["transforms.fuse_swiglu.enabled=false"], backend="eager")
    two = LLM("tiny-llama", config={"transforms": {"fuse_swiglu": {"enabled": False}}}, backend="eager")
    assert [{k: v for k, v in one.items() if k != "progress"} for one in asked[:1]] == [
        {k: v for k, v in two.items() if k != "progress"} for two in asked[1:]
    ]
    shown = [{name: (r.status, len(r.matches)) for name, r in llm.report.transforms.items()} for llm in (one, two)]
    assert shown[0] == shown[1] and shown[0]["fuse_swiglu"] == ("disabled", 0)


def test_every_stage_gives_a_record_that_nothing_changes():
    told = []
    model = load_model("tiny-llama")
    settings = stages.settings_for(model, None)
    target = stages.target_of(model, settings, "eager")
    captured = stages.capture(model, lambda what, *_: told.append(phase_of(what)))
    made = stages.transform(
        model, captured, settings, target, keep_weights=True, progress=lambda what, *_: told.append(phase_of(what))
    )
    lowered = stages.lower(model, made, settings, target, keep_weights=True)
    assert target.device == torch.device("cpu") and lowered.backend == target.backend == "eager"
    assert len(made.layers) == len(made.layer_names) == model.layers
    assert list(dict.fromkeys(told)) == [CAPTURE, TRANSFORMS, LOWERING]
    for record in (target, captured, made, lowered):
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.backend = "other"
