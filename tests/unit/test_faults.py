"""The faults that tests/mutation.py plants can be planted, and the tests named for them are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import FAULTS

ROOT = Path(__file__).parents[2]


def test_there_are_faults_in_every_package():
    packages = {path.name for path in (ROOT / "src/graft").iterdir() if (path / "__init__.py").exists()}
    assert len(FAULTS) >= 60 and {fault.file.partition("/")[0] for fault in FAULTS} == packages


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file)
def test_the_right_text_stands_once_and_the_tests_exist(fault):
    text = (ROOT / "src/graft" / fault.file).read_text()
    assert text.count(fault.right) == 1 and fault.wrong != fault.right
    for name in fault.arguments:
        file, _, test = name.partition("::")
        if ".py" in file:
            assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text() if test else (ROOT / file).exists()
