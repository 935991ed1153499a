"""schemathesis against a real server with a tiny model: no answer may be a 500, or another than /openapi.json says.

python tests/clients/fuzz.py SCHEMATHESIS [EXAMPLES]     # the program, of its own venv: 4.32.5
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "cases"), str(TESTS)]

from serve_cases import serving, tiny_checkpoint  # noqa: E402

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main(program: str, examples: str = "100") -> int:
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        model = tiny_checkpoint(Path(folder) / "tiny-served")
        options = ("--dtype", "float32", "--backend", "eager", "--max-num-seqs", 16, "--kv-cache-memory", "4MiB")
        with serving(model, *options, stub=False, errors=nowhere, OMP_NUM_THREADS="1") as server:
            command = [program, "run", f"{server.url}/openapi.json", "--checks", CHECKS, "-n", examples]
            command += ["--request-timeout", "120", "--no-color", "--continue-on-failure"]
            return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
