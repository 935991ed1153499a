"""Faults in what a request may ask for: masks, prompts that are cut, tokens in and out, logprobs of items."""

from __future__ import annotations

from fault import fault

MASKS = "unit/engine/test_masks.py"
CUT = "unit/serve/test_truncation.py"
TOKENS = "unit/serve/test_token_endpoint.py"
ITEMS = "unit/serve/test_response_logprobs.py"
REQUEST_FAULTS = [
    fault("engine/masks.py", "self.came = [*self.came, token][-self.longest :]", "self.came = [token]", MASKS),
    fault("engine/masks.py", "for text in (bare, f\" {bare}\"):", "for text in (bare,):", MASKS),
    fault("engine/masks.py", "made.came = list(self.came)", "made.came = []", MASKS),
    fault("engine/masks.py", "return AllOf([mask.copy() for mask in self.masks])", "return self", MASKS),
    fault("engine/masks.py", "left = set(params.only) - stops", "left = set(params.only)", MASKS),
    fault("engine/decode/choose.py", "if params.bad_words:", "if params.bad_words and new_tokens:", MASKS),
    fault("engine/frontend.py", "found.append(OnlyThese(params.only, self.vocabulary))", "pass", MASKS),
    fault("serve/protocol/truncation.py", "ids[-most:] if self.left else ids[:most]", "ids[:most]", CUT),
    fault("serve/protocol/truncation.py", "most = max(room, 1) if", "most = max(room + 1, 1) if", CUT),
    fault("serve/protocol/token_answers.py", "if other != token]", "]", TOKENS),
    fault("serve/protocol/token_requests.py", '"max_tokens"), logprobs)', '"max_tokens") or 16, logprobs)', TOKENS),
    fault("serve/protocol/response_items.py", "        if piece.elsewhere:\n", "        if False:\n", ITEMS),
    fault("serve/wire.py", "each[-1] = each[-1]", "each[0] = each[0]", "unit/serve/test_answers.py"),
]  # fmt: skip
