"""A real server that embeds: what clients get is what Hugging Face's base model gives."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch

from embedding_cases import LAST, embedder, hidden_states, unit
from serve_cases import PATIENCE, http_client, poll, serving

EXAMPLES = Path(__file__).parents[2] / "docs" / "serve.md"
FAR = 2e-5
TEXTS = ["the quick brown fox", "Hello, 你好 🙂", "naïve café and the lazy dog jumps over"]


@pytest.mark.exhaustive  # the short run: test_embeddings.py, the route; test_embed.py, the vectors
def test_vectors_of_a_real_server(tmp_path):
    folder = embedder(tmp_path / "embedder", "qwen3", pooling=LAST, tie_word_embeddings=False, is_matryoshka=True)
    size = ("--runner", "pooling", "--dtype", "float32", "--backend", "eager", "--kv-cache-memory", "4MiB")
    with (
        serving(folder, *size, stub=False, OMP_NUM_THREADS="1") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client,
        http_client(server.url) as plain,
    ):
        ids = [plain.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
        right = [unit(states[-1]) for states in hidden_states(folder, ids)]

        def near(found, expected):
            given = torch.tensor([one.embedding for one in found.data])
            return torch.allclose(given, torch.stack(expected), atol=FAR, rtol=0)

        def ask(given, **more):
            return client.embeddings.create(model="embedder", input=given, **more)

        assert near(ask(TEXTS), right)  # the client asks for base64, and reads it
        assert not near(ask(TEXTS), right[::-1])
        assert near(ask(ids, encoding_format="float"), right)
        cut = ask(TEXTS, dimensions=16)
        assert near(cut, [unit(one[:16]) for one in right]) and len(cut.data[0].embedding) == 16
        assert cut.usage.prompt_tokens == sum(map(len, ids))
        with ThreadPoolExecutor(16) as pool:  # in company
            for index, found in enumerate(pool.map(lambda i: ask(TEXTS[i % 3]), range(48))):
                assert near(found, [right[index % 3]])
        (example,) = re.findall(r"```sh\n(curl [^`]*/v1/embeddings[^`]*)```", EXAMPLES.read_text())
        text = example.replace("http://127.0.0.1:8000", server.url)
        told = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout
        assert [len(one["embedding"]) for one in json.loads(told)["data"]] == [64, 64]
        poll(lambda: plain.get("/health").json()["running"] == 0)
        server.signal()
        assert server.ended() == 0
