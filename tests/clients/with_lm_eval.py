"""lm-eval's local-completions: loglikelihoods by echo and logprobs, and generation, on a task of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""


def main(base: str, model: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "capitals.jsonl"
        names = list(CAPITALS.values())
        rows = [{"country": c, "choices": names, "answer": names.index(one)} for c, one in CAPITALS.items()]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (Path(folder) / "capitals.yaml").write_text(TASK.replace("FILE", str(data)))
        arguments = {
            "model": model, "base_url": f"{base}/completions", "tokenizer": tokenizer, "num_concurrent": 1,
            "max_retries": 1, "tokenized_requests": True, "max_length": 512,
        }  # fmt: skip
        found = lm_eval.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=["capitals"],
            task_manager=TaskManager(include_path=folder), bootstrap_iters=0,
        )  # fmt: skip
        accuracy = found["results"]["capitals"]["acc,none"]
        assert accuracy >= 0.8, accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
