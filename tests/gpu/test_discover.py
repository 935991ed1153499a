"""Candidates timed on a GPU."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from graft.cli.app import app

OFF = ("--set", "transforms.fuse_rms_norm.enabled=false", "--set", "transforms.fuse_add_rms_norm.enabled=false")


def test_a_spelled_out_norm_is_timed_beside_its_kernel_and_a_copy():
    done = CliRunner().invoke(app, ["discover", "llama-3.2-1b", "--tokens", "1,64", "--json", *OFF])
    assert done.exit_code == 0, done.output
    first = json.loads(done.stdout)["candidates"][0]
    assert first["existing"][0]["symbol"] == "graft::add_rms_norm"
    for one in first["measured"]:
        assert one["device"] == "cuda" and not one["problem"]
        assert 0 < one["existing_us"] < one["now_us"]  # one kernel instead of nine calls
        assert one["saving_us"] > 0
