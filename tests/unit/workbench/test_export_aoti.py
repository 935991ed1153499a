"""graft export --aoti: a package that a fresh process loads and runs, compared with eager before it is written."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import stage_programs as programs
from graft.base.errors import ExportRefused
from graft.cli.app import app
from graft.workbench.export import aoti
from graft.workbench.export.aoti import (
    Exportable,
    largest_error,
    open_dims,
    run_package,
    target_program,
    write_package,
)
from graft.workbench.stages.targets import StageTarget, find_target

X = torch.arange(6.0).reshape(2, 3)


class Counting(nn.Module):
    """Writes a buffer in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen.add_(1)
        return torch.nn.functional.silu(x) * self.seen


def counting() -> Exportable:
    return target_program(StageTarget("counting", Counting(), ((X,), (torch.cat((X, X)),), (X,))))


def test_sizes_that_differ_between_calls_are_open():
    dims = open_dims([(torch.ones(2, 3), 4, torch.ones(3)), (torch.ones(5, 3), 4, torch.ones(3))])
    assert [sorted(one) if one is not None else None for one in dims] == [[0], None, []]
    made = counting()
    assert made.dynamic == ("argument 1, dim 0",)
    assert [r.abs().max().item() for r in made.expected] == pytest.approx([4.9665, 9.9331, 14.8997], rel=1e-4)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (X.clone(), 0.0),
        (X + 0.005, 0.001),
        (X.double(), math.inf),
        (X[:1], math.inf),
        (torch.where(X == 2, math.nan, X), math.inf),
        ([X, X], math.inf),
    ],
)
def test_differences_to_eager(other, error):
    assert largest_error([X], other if isinstance(other, list) else [other]) == pytest.approx(error, rel=1e-3)


@pytest.mark.exhaustive
def test_a_package_that_is_wrong_or_does_not_run_is_not_kept(tmp_path, monkeypatch):
    made, file = counting(), tmp_path / "package.pt2"
    monkeypatch.setattr(aoti, "build_package", lambda _program, path, _options: path.write_bytes(b"no package"))
    with pytest.raises(ExportRefused, match="does not run in a fresh process: "):
        run_package(tmp_path / "nothing.pt2", made.calls, ())
    wrong = {"returned": [r + 0.1 for r in made.expected], "load_seconds": 0.0, "call_seconds": 0.0}
    monkeypatch.setattr(aoti, "run_package", lambda *_: wrong)
    with pytest.raises(ExportRefused, match="differs from eager by"):
        write_package(made, file)
    assert list(tmp_path.iterdir()) == []
    wrong["returned"] = list(made.expected)
    assert write_package(made, file).error == 0 and file.exists()


def test_what_cannot_be_exported_is_refused(tmp_path):
    def looks(x):
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(ExportRefused, match=r"torch\.export refuses looks: "):
        target_program(StageTarget("looks", looks, ((X,),)))
    with pytest.raises(ExportRefused, match=r"has to end in \.pt2"):
        write_package(counting(), tmp_path / "package.so")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--aoti", "--format", "pt2"), "--aoti and --format pt2 are two formats"),
        ((), "--format is missing"),
        (("--format", "pt2", "--fusions"), "--fusions is for packages of AOTInductor"),
        (("--aoti", "--step", "captured"), "--step is for a folder of graft dump"),
    ],
)
def test_bad_requests_end_in_one_line(tmp_path, words, message):
    result = CliRunner().invoke(app, ["export", f"{programs.__file__}:step", "-o", str(tmp_path / "x.pt2"), *words])
    assert result.exit_code in (1, 2) and message in result.output and "Traceback" not in result.output


def test_a_dump_without_weights_is_refused(tmp_path):
    run = CliRunner().invoke(app, ["dump", "tiny-llama", "-o", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--aoti", "-o", str(tmp_path / "x.pt2")])
    assert result.exit_code == 1 and "holds no weights" in result.output


@pytest.mark.exhaustive
def test_a_package_with_open_sizes_and_a_written_buffer_runs_in_a_fresh_process(tmp_path):
    done = write_package(counting(), tmp_path / "package.pt2")
    assert done.error < 1e-6 and done.calls == 3 and done.modules == () and done.call_us > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("fusions", [False, True])
def test_a_model_is_packaged(tmp_path, fusions):
    file = tmp_path / "llama.pt2"
    words = ["export", "tiny-llama", "--aoti", "-o", str(file), "--json", *(["--fusions"] if fusions else [])]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.strip().splitlines()[-1])
    assert found["error"] < 1e-4 and found["bytes"] == file.stat().st_size
    assert found["modules"] == (["graft.ops"] if fusions else [])


def test_a_model_is_called_with_two_lengths():
    assert [call[0].shape[1] for call in find_target("tiny-llama", (8, 12)).calls] == [8, 12]
