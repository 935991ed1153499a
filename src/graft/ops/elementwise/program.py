"""The program of an elementwise region: short SSA text that a graph dump shows as it is.

    t0 = mul(i0, 0.5); t1 = tanh(t0); t2 = to(t1, bfloat16); return t2

`iN` is the op's N-th input, `tN` the N-th value; names count up without gaps, every input is read. Numbers are
Python literals (`1` and `1.0` promote differently), `inf`, `nan`, `True` and `False`. Nothing else is allowed, and
the text of a program is unique: `parse(text).text == text`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NoReturn

import torch

from graft.errors import ProgramError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)
}
# What each op takes: t a tensor (input or value), s a tensor or a number, n a number, d a dtype.
SIGNATURES = {
    **{name: "ts" for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: "tn" for name in ("rsub", "clamp_min", "clamp_max")},
    **{name: "tt" for name in ("minimum", "maximum", "logical_and", "logical_or", "bitwise_and", "bitwise_or")},
    **{
        name: "t" for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "tanh")
    },
    **{name: "t" for name in ("sigmoid", "silu", "gelu", "gelu_tanh", "relu", "softplus")},
    **{name: "t" for name in ("logical_not", "bitwise_not")},
    "clamp": "tnn",
    "where": "tss",
    "to": "td",
}
KINDS = {"t": "a tensor", "s": "a tensor or a number", "n": "a number", "d": "a dtype"}
NUMBER = r"-?(?:\d+\.\d+(?:e[+-]?\d+)?|\d+(?:e[+-]?\d+)?|inf|nan)|True|False"
TOKEN = re.compile(rf"(?P<number>(?:{NUMBER})(?![\w.]))|(?P<name>[a-z]\w*)|(?P<mark>[=(),;])")


@dataclass(frozen=True)
class Ref:
    """`i3` or `t3`."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


Number = bool | int | float
Argument = Ref | Number | torch.dtype


@dataclass(frozen=True)
class Call:
    op: str
    args: tuple[Argument, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(argument_text(a) for a in self.args)})"


@dataclass(frozen=True)
class Program:
    """Call N makes value tN; `returns` are indices of values."""

    calls: tuple[Call, ...]
    returns: tuple[int, ...]

    @cached_property
    def inputs(self) -> int:
        return 1 + max(a.index for c in self.calls for a in c.args if isinstance(a, Ref) and a.kind == "i")

    @property
    def text(self) -> str:
        lines = [f"t{index} = {call}" for index, call in enumerate(self.calls)]
        return "; ".join([*lines, "return " + ", ".join(f"t{index}" for index in self.returns)])


def argument_text(argument: Argument) -> str:
    return str(argument).removeprefix("torch.") if isinstance(argument, torch.dtype) else str(argument)


@lru_cache(maxsize=4096)
def parse(text: str) -> Program:
    """The program that `text` spells, or ProgramError with the position of the first thing that is wrong."""
    return Parser(text).program()


class Parser:
    """Reads one program from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self.scan())
        self.next = 0
        self.values = 0

    def scan(self) -> list[tuple[str, str, int]]:
        tokens, position = [], 0
        while position < len(self.text):
            found = TOKEN.match(self.text, position)
            if self.text[position] == " ":
                position += 1
            elif found is None:
                self.fail(position, f"{self.text[position]!r} is not part of the language")
            else:
                tokens.append((str(found.lastgroup), found.group(), position))
                position = found.end()
        return [*tokens, ("end", "", len(self.text))]

    def fail(self, position: int, problem: str) -> NoReturn:
        raise ProgramError(self.text, position, problem)

    def take(self, wanted: str) -> tuple[str, int]:
        """The next token, which must be of that kind or be that very mark."""
        kind, text, position = self.tokens[self.next]
        if wanted not in (kind, text):
            self.fail(position, f"expected {wanted!r}, found {text or 'the end'!r}")
        self.next += 1
        return text, position

    def program(self) -> Program:
        calls: list[Call] = []
        while self.tokens[self.next][1] != "return":
            name, position = self.take("name")
            if name != f"t{len(calls)}":
                self.fail(position, f"the next value is t{len(calls)}, not {name}")
            self.take("=")
            calls.append(self.call())
            self.values = len(calls)
            self.take(";")
        _, position = self.take("return")
        if not calls:
            self.fail(position, "a program computes at least one value")
        program = Program(tuple(calls), self.returned())
        self.check(program)
        return program

    def returned(self) -> tuple[int, ...]:
        found: list[int] = []
        while True:
            name, position = self.take("name")
            ref = self.reference(name, position)
            if ref.kind != "t" or ref.index in found:
                self.fail(position, f"{name} is an input or is returned already")
            found.append(ref.index)
            if self.tokens[self.next][0] == "end":
                return tuple(found)
            self.take(",")

    def call(self) -> Call:
        op, position = self.take("name")
        if op not in SIGNATURES:
            self.fail(position, f"{op!r} is not an op; known are {', '.join(sorted(SIGNATURES))}")
        self.take("(")
        args: list[Argument] = []
        for index, kind in enumerate(SIGNATURES[op]):
            if index:
                self.take(",")
            args.append(self.argument(kind))
        if op == "where" and not any(isinstance(a, Ref) for a in args[1:]):
            self.fail(position, "where needs a tensor to choose from")
        self.take(")")
        return Call(op, tuple(args))

    def argument(self, kind: str) -> Argument:
        found, text, position = self.tokens[self.next]
        self.next += 1
        if found == "number" and kind in "sn":
            return {"True": True, "False": False}[text] if text in ("True", "False") else number(text)
        if found == "name" and kind == "d" and text in DTYPES:
            return DTYPES[text]
        if found == "name" and kind in "st":
            return self.reference(text, position)
        self.fail(position, f"expected {KINDS[kind]}, found {text or 'the end'!r}")

    def reference(self, name: str, position: int) -> Ref:
        if not re.fullmatch(r"[it](0|[1-9]\d*)", name):
            self.fail(position, f"{name!r} is neither an input iN nor a value tN")
        ref = Ref(name[0], int(name[1:]))
        if ref.kind == "t" and ref.index >= self.values:
            self.fail(position, f"{name} is read before it is computed")
        return ref

    def check(self, program: Program) -> None:
        """Inputs have no gaps, and the text is the one spelling of the program."""
        read = {a.index for c in program.calls for a in c.args if isinstance(a, Ref) and a.kind == "i"}
        gap = next(index for index in range(len(read) + 1) if index not in read)
        if gap != len(read) or not read:
            self.fail(len(self.text), f"i{gap} is never read")
        if program.text != self.text:
            same = next(
                i for i, (a, b) in enumerate(zip(program.text + "\0", self.text + "\0", strict=False)) if a != b
            )
            self.fail(same, f"this program is spelled {program.text!r}")


def number(text: str) -> int | float:
    return float(text) if re.search(r"[.einf]", text.lstrip("-")) or text.endswith("nan") else int(text)
