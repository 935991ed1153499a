"""The rewritten asserts of test files, made once in a run without bytecode.

The processes of a run import the same files at the same time, and each would rewrite them all: 10 core-seconds of the
30 that it takes to collect. Here each rewrites its share beforehand, and finds the others' when it imports them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config) -> None:
    """Of the files in the folders that are asked for, those of this process."""
    worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("", "_COUNT"))
    if not (worker and count) or sys.dont_write_bytecode:
        return
    folders = [folder for folder in map(Path, config.args) if folder.is_dir()]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    write_bytecode(config, files[int(worker.removeprefix("gw")) :: int(count)])


def write_bytecode(config: pytest.Config, files: Sequence[Path]) -> None:
    """As pytest's import hook writes it, atomically."""
    state = config.stash[rewrite.assertstate_key]
    for file in files:
        target = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, target) is None and rewrite.try_makedirs(target.parent):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source, target)
