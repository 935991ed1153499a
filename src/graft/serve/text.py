"""Between text and tokens, in the HTTP process: what graft.LLM does with the model's tokenizer, without torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from graft.base.errors import HttpRefused, TokenizerRefused
from graft.engine.grammar import Grammars, choice_grammar, json_grammar, marked_grammar, regex_grammar
from graft.serve.protocol import values
from graft.serve.protocol.structure import AskedSchema
from graft.serve.tools.formats import AUTO, FORMATS, ToolFormat, described, format_of
from graft.serve.tools.reasoning import marks_of
from graft.serve.wire import ServedModel

Conversation = Sequence[Mapping[str, Any]]
SHORT = 4096  # characters that are encoded in the event loop: about a millisecond


def import_templates() -> None:
    """Takes longer than most of a warm start: done while the engine loads."""
    import transformers.utils.chat_template_utils  # noqa: F401


class ServedText:
    """The tokenizer of the served model. Encoding equals LLM.encode and LLM.chat_prompt; the probes hold that."""

    def __init__(self, model: ServedModel, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self.model, self.tool_parser = model, tool_parser
        self.think_marks = marks_of(reasoning_parser, model.chat_template)
        self.tokenizer: Tokenizer | None = None
        self.pieces: dict[int, str] = {}  # tokens as text, for logprobs; as many as the vocabulary has at most
        self.grammars: Grammars | None = None  # of schemas
        self.compiling = threading.Lock()
        if model.tokenizer is not None:
            self.tokenizer = self.read(model.tokenizer)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.check(model.probes)
        if model.chat_template is not None:
            import_templates()  # now, and not with the first conversation

    def read(self, text: str) -> Tokenizer:
        try:
            return Tokenizer.from_str(text)
        except Exception as error:  # the library raises no class of its own
            raise TokenizerRefused(self.model.name, f"its tokenizer.json cannot be read ({error})") from error

    def check(self, probes: Sequence[tuple[str, list[int], str]]) -> None:
        for text, ids, again in probes:
            if self.ids(text) != ids or self.decode(ids) != again:
                raise TokenizerRefused(self.model.name, f"as a tokenizer.json it gives other tokens for {text!r}")

    @property
    def known(self) -> Tokenizer:
        if self.tokenizer is None:
            raise HttpRefused(f"{self.model.name} has no tokenizer: give a prompt as token ids", param="prompt")
        return self.tokenizer

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls; a model that is never told of tools is refused."""
        template = self.model.chat_template
        found = format_of(self.tool_parser, template)
        if found is None or (template is not None and "tools" not in template and self.tool_parser != "smollm"):
            shows = "has marks of calls that are not known" if "tools" in (template or "") else "shows it no tools"
            raise HttpRefused(
                f"tools: the chat template of {self.model.name} {shows}; start the server with --tool-call-parser,"
                f" one of {', '.join(FORMATS)} (smollm describes tools in the system prompt, whatever the template)",
                param="tools",
                code="unsupported_parameter",
            )
        return found

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Those that are left out of texts."""
        added = self.known.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def is_special(self, text: str) -> bool:
        return text in self.special_tokens

    def grammar(self, asked: AskedSchema) -> str:
        """For the engine's grammar.py; checked here, so that what is wrong with it is the client's error."""
        if asked.marks is not None:
            found = marked_grammar(asked.schema, *asked.marks, special=self.is_special(asked.marks[0]))
        elif asked.regex is not None:
            found = regex_grammar(asked.regex)
        else:
            found = choice_grammar(asked.choices) if asked.choices else json_grammar(asked.schema)
        self.read_vocabulary().mask(found)
        return found

    def read_vocabulary(self) -> Grammars:
        """Takes a second, in which no other thread runs; so it is done before the server is ready."""
        with self.compiling:
            if self.grammars is None:
                _ = self.known
                self.grammars = Grammars(self.model.tokenizer or "", self.model.vocabulary, self.model.end_tokens)
        return self.grammars

    def ids(self, text: str, special: bool = True) -> list[int]:
        return self.known.encode(text, add_special_tokens=special).ids

    async def encode(self, text: str, special: bool = True) -> list[int]:
        return (await self.encode_all([text], special))[0]

    async def encode_all(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Long ones, or many, in a thread of their own: other requests go on."""
        if sum(map(len, texts)) <= SHORT:
            return [self.ids(text, special) for text in texts]
        return await asyncio.to_thread(lambda: [self.ids(text, special) for text in texts])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        """As the Detokenizer calls it."""
        return self.known.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token: int) -> str:
        """One token as text, for logprobs; part of a character is shown as U+FFFD."""
        if self.tokenizer is None:
            return str(token)
        found = self.pieces.get(token)
        if found is None:
            found = self.pieces[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return found

    async def chat(
        self,
        messages: Conversation,
        *,
        generation: bool,
        options: Mapping[str, Any],
        tools: Conversation | None = None,
        continues: bool = False,
    ) -> list[int]:
        """The conversation in the model's chat template, which runs in jinja2's sandbox. options: variables of the
        template, such as enable_thinking. continues: the last message is not closed."""
        text = await asyncio.to_thread(self.render, messages, generation, options, tools, continues)
        return await self.encode(values.text(text, "messages"), special=False)

    def render(
        self,
        messages: Conversation,
        generation: bool,
        options: Mapping[str, Any],
        tools: Conversation | None = None,
        continues: bool = False,
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.model.chat_template is None:
            raise HttpRefused(
                f"{self.model.name} has no chat template; use /v1/completions with the prompt as it is",
                param="messages",
            )
        conversation = [dict(message) for message in messages]
        if tools is not None and "tools" not in self.model.chat_template and self.tool_format:
            conversation, tools = described(tools, conversation), None
        given: Any = None if tools is None else [dict(tool) for tool in tools]
        try:
            variables: Any = {**self.model.special_tokens, **options, "add_generation_prompt": generation}
            variables["continue_final_message"] = continues
            rendered, _ = render_jinja_template(
                [conversation], tools=given, chat_template=self.model.chat_template, **variables
            )
        except TemplateError as error:  # a template may refuse what it does not know: "roles must alternate"
            why = f"the chat template of {self.model.name} refuses the conversation: {error}"
            raise HttpRefused(why, param="messages") from error
        except Exception as error:  # a model's own program, over whatever a client sent
            why = f"the chat template of {self.model.name} cannot render the conversation: {error}"
            raise HttpRefused(why, param="messages") from error
        return rendered[0]
