"""llm, the command: a model of extra-openai-models.yaml, whole and streamed, and with a schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["Paris", "Rome"]},
            "population": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["name", "population"],
        "additionalProperties": False,
    }
)


def main(base: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = f"- model_id: mine\n  model_name: {model}\n  api_base: {base}\n  supports_schema: true\n"
        (Path(folder) / "extra-openai-models.yaml").write_text(entry)

        def ask(*options: str) -> str:
            command = [str(Path(sys.executable).parent / "llm"), "-m", "mine", "--key", "any", *options]
            command += ["-o", "temperature", "0", "-o", "max_tokens", "60"]
            environment = {**os.environ, "LLM_USER_PATH": folder}
            return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

        asked = "What is the capital of France?"
        assert ask(asked).strip() and ask(asked) == ask(asked, "--no-stream")
        assert set(json.loads(ask("A city.", "--schema", SCHEMA))) == {"name", "population"}


if __name__ == "__main__":
    main(*sys.argv[1:])
