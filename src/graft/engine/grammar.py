"""Grammars of answers, by llguidance: which tokens may come next. An optional library: `graft[serve]` has it.

Nothing here needs torch, so that a server's HTTP process can say what is wrong with a schema before it is sent on.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from graft.base.errors import ExtraMissing, GrammarRefused, UsageError

KEPT = 64  # grammars that stay compiled
# ways in which a token may be read. Ambiguous recursion had 1,400 of them, and masks of half a second each; a call of
# 128 functions or an object of 140 properties that may be left out stay below
MOST_ITEMS = 600
# where nothing can be read in two ways: an object of 490 properties that may be left out, 0.6 s to compile
MOST_PLAIN_ITEMS = 2000
AMBIGUOUS = ("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "patternProperties", "start:")
# no blanks between tokens of JSON: models otherwise write them until max_tokens. What is not known is an error.
COMPACT = {"whitespace_flexible": False, "lenient": False}
SPACED = COMPACT | {"item_separator": ", ", "key_separator": ": "}


class GrammarMask:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: Any, ends: Collection[int], vocabulary: int) -> None:
        self.matcher, self.ends, self.vocabulary = matcher, ends, vocabulary

    def allowed(self) -> np.ndarray:
        """[vocab] bool. At the end of the grammar: end tokens alone."""
        if self.matcher.is_stopped():
            found = np.zeros(self.vocabulary, dtype=bool)
            found[list(self.ends)] = True
            return found
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.vocabulary].astype(bool)

    def accept(self, token: int) -> str | None:
        """Takes note of a token; why it cannot."""
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token)
        return message(self.matcher.get_error()) if self.matcher.is_error() else None

    def copy(self) -> GrammarMask:
        return GrammarMask(self.matcher.deep_copy(), self.ends, self.vocabulary)


class Grammars:
    """The grammars of one tokenizer (the text of a tokenizer.json), compiled once each. Safe in any thread."""

    def __init__(self, tokenizer: str, vocabulary: int, ends: Collection[int]) -> None:
        llguidance = library()
        spec = json.loads(tokenizer)
        self.ends, self.vocabulary = sorted(token for token in ends if token < vocabulary), vocabulary
        if not self.ends:
            raise UsageError(f"grammar: no end token lies in the vocabulary of {vocabulary}, so none can be kept to")
        try:
            self.tokens = llguidance.LLTokenizer(
                byte_level(spec), n_vocab=max(token_count(spec), vocabulary), eos_token=self.ends
            )
        except ValueError as error:  # the library's own class for all that it cannot read
            raise UsageError(f"grammar: none can be kept to with this tokenizer: {error}") from error
        self.made: OrderedDict[str, GrammarMask] = OrderedDict()
        self.lock = threading.Lock()

    def mask(self, grammar: str) -> GrammarMask:
        """At its beginning. A grammar that cannot be is refused."""
        with self.lock:
            found = self.made.get(grammar)
        if found is None:
            found = self.compiled(grammar)
            with self.lock:
                self.made[grammar] = found
                while len(self.made) > KEPT:
                    self.made.popitem(last=False)
        return found.copy()

    def compiled(self, grammar: str) -> GrammarMask:
        llguidance = library()
        most = MOST_ITEMS if any(word in grammar for word in AMBIGUOUS) else MOST_PLAIN_ITEMS
        limits = llguidance.LLParserLimits(max_items_in_row=most, verbose_errors=False)
        if problem := llguidance.LLMatcher.validate_grammar(grammar, self.tokens, limits=limits):
            raise GrammarRefused(message(problem))
        matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        found = GrammarMask(matcher, self.ends, self.vocabulary)
        allowed = found.allowed()  # builds the lexer and the first row, which the validation does not
        if matcher.is_error():
            raise GrammarRefused(message(matcher.get_error()))
        for opening in (b"{", b"["):  # most rows that are too wide are the second one
            first = self.tokens.tokenize_bytes(opening)[0]
            if first < self.vocabulary and allowed[first] and (why := found.copy().accept(first)):
                raise GrammarRefused(why)
        return found


def message(error: str) -> str:
    """Of the library's text, without the mark of what it left out."""
    return error.removesuffix("<non-verbose/>").strip()


def library() -> Any:
    try:
        return import_module("llguidance")
    except ModuleNotFoundError as error:
        raise ExtraMissing("structured output", "serve", "llguidance") from error


def json_grammar(schema: Mapping[str, Any]) -> str:
    """What SamplingParams.grammar takes, for JSON of this schema, without blanks between its parts."""
    try:
        return library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)
    except (ValueError, RecursionError) as error:  # half of a surrogate pair, a number that no double holds, a cycle
        raise GrammarRefused(str(error)) from error


def marked_grammar(schema: Mapping[str, Any], opening: str, closing: str, special: bool) -> str:
    """For any text in which JSON of the schema stands between these marks, as models write it: with a blank behind
    commas and colons, and perhaps on a line of its own. special: the opening is one token, which no other text is."""
    tags = library().StructTag
    inner = f"start: /\\n?/ json /\\n?/\njson: %json {json.dumps({**schema, 'x-guidance': SPACED})}"
    tag = tags(trigger=opening, begin=opening, grammar=inner, end=closing)
    return tags.to_grammar([tag], assume_special=special)


def regex_grammar(pattern: str) -> str:
    """For a text that this regular expression matches as a whole; Rust's syntax, without look-around."""
    return library().LLMatcher.grammar_from_regex(pattern)


def choice_grammar(texts: Sequence[str]) -> str:
    """For one of these texts."""
    return library().LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))


def token_count(spec: Mapping[str, Any]) -> int:
    """Of a tokenizer.json. To make a Tokenizer of it takes a second, in which no other thread runs."""
    vocabulary = spec["model"]["vocab"]
    known = set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    return len(known | {token["content"] for token in spec.get("added_tokens", ())})


def byte_level(spec: dict[str, Any]) -> str:
    """llguidance takes the bytes of tokens from the decoder. Tokenizers that were made from GGUF files have several
    decoders in a row, and then "Ġthe" would be the bytes of Ġ, and not a blank."""
    if "ByteLevel" in json.dumps(spec.get("pre_tokenizer")):
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        spec = {**spec, "decoder": decoder}
    return json.dumps(spec)
