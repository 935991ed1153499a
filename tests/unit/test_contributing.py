"""What CONTRIBUTING promises of commits is what the hooks do."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def hooks() -> dict[str, dict]:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    return {hook["id"]: hook for hook in repo["hooks"]}


def test_hooks_run_what_make_check_runs():
    checked = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    entries = " ".join(hook["entry"] for hook in hooks().values())
    for line in checked.splitlines():
        tool = " ".join(line.replace("$(BIN)/", "").split()[:2])
        assert tool.removesuffix(" .").split()[0] in entries, tool


def test_a_commit_without_a_sign_off_is_found():
    pattern = re.compile(hooks()["signed-off"]["entry"], re.MULTILINE)
    assert hooks()["signed-off"]["args"] == ["--negate", "--multiline"]
    assert pattern.search("Fuse it\n\nSigned-off-by: Ada Lovelace <ada@example.org>\n")
    for text in ("Fuse it\n", "Fuse it\n\nSigned-off-by: Ada\n", "Not Signed-off-by: Ada <ada@example.org>\n"):
        assert not pattern.search(text)
    assert "git commit -s" in (ROOT / "CONTRIBUTING.md").read_text()
