"""graft autofuse: what is wrong with a request is told in a line, before anything is captured."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from graft.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tiny-llama", "--budget", "0m"], "--budget 0m: write seconds, minutes or hours"),
        (["tiny-llama", "--steps", "0"], "--steps must be at least 1"),
        (["tiny-llama", "--repeats", "1"], "noise cannot be told"),
        (["tiny-lama", "--steps", "1"], "did you mean 'tiny-llama'"),
        (["tiny-llama", "-o", "docs"], "was not made by graft autofuse"),
        (["tiny-llama", "-o", "9lives"], "cannot be a package's name"),
    ],
)
def test_bad_input(arguments, told):
    done = CliRunner().invoke(app, ["autofuse", *arguments])
    assert done.exit_code == 2 and told in done.output
    assert done.output.count("\n") == 1
