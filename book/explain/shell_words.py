"""The words of a shell script: what quotes, variables, arrays, defaults and arithmetic stand for."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Iterator, Sequence

from book.explain.shell_tokens import bracket_end, quoted_end

ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


class Undecided(str):
    """A word, or a flag, that depends on a `condition` without an answer; `flags` are those that it may stand for."""

    condition: str
    flags: tuple[str, ...]

    def __new__(cls, text: str, condition: str, flags: Sequence[str] = ()) -> Undecided:
        word = super().__new__(cls, text)
        word.condition, word.flags = condition, tuple(flags)
        return word


class Expander:
    """Words, with the variables that a script set so far; what nothing sets stays as it is written."""

    def __init__(self) -> None:
        self.variables: dict[str, str | list[str]] = {}

    def words(self, raw: str) -> list[str]:
        """The words that a word stands for: none, one or many."""
        return [one for field in _fields(self.pieces(raw)) for one in _spread(field)]

    def text(self, raw: str) -> str | list[str]:
        """The value of an assignment, which is not split; its words, where some of many are undecided."""
        pieces = [one for one, _ in self.pieces(raw)]
        each = [word for one in pieces for word in (one if isinstance(one, list) else [one])]
        if any(isinstance(word, Undecided) for word in each) and re.search(r"\s", " ".join(each)):
            return _fields((one, False) for one in pieces)
        return _joined([" ".join(one) if isinstance(one, list) else one for one in pieces])

    def pieces(self, raw: str) -> Iterator[tuple[str | list[str], bool]]:
        """Pieces of a word, with the values of variables, and whether each is quoted."""
        at = 0
        while at < len(raw):
            if raw[at] == "$":
                text, at = self.value(raw, at)
                yield text, isinstance(text, str) and text.startswith("$")  # what nothing sets stays one word
            elif raw[at] in "'\"":
                end = quoted_end(raw, at)
                inner = raw[at + 1 : end - 1]
                yield from [(inner, True)] if raw[at] == "'" else self.inside(inner)
                at = end
            elif raw[at] == "`":
                end = quoted_end(raw, at)
                yield raw[at:end], True
                at = end
            elif raw[at] == "\\":
                yield raw[at + 1 : at + 2], True
                at += 2
            else:
                end = next((i for i in range(at, len(raw)) if raw[i] in "$'\"`\\"), len(raw))
                yield raw[at:end], False
                at = end

    def inside(self, text: str) -> Iterator[tuple[str | list[str], bool]]:
        """The pieces between double quotes."""
        at, said = 0, False
        while at < len(text):
            if text[at] == "$":
                value, at = self.value(text, at)
                yield value, True
            else:
                of = re.compile(r"(\\(.)|[^\\$])+", re.DOTALL).match(text, at)
                yield re.sub(r"\\(.)", r"\1", of[0]), True
                at = of.end()
            said = True
        if not said:
            yield "", True

    def value(self, raw: str, at: int) -> tuple[str | list[str], int]:
        """What stands behind the dollar at this place, and where it ends; what nothing sets stays as it is."""
        rest = raw[at:]
        if of := re.match(r"\$\(\((.*?)\)\)", rest, re.DOTALL):
            return self.arithmetic(of[1]), at + of.end()
        if rest.startswith("$("):
            end = bracket_end(rest, 1)
            return rest[:end], at + end
        if rest.startswith("${"):
            end = bracket_end(rest, 1)
            return self.parameter(rest[2 : end - 1], rest[:end]), at + end
        if of := re.match(r"\$(\w+|[@*#?$!-])", rest):
            if of[1] in "@*":
                return [], at + of.end()
            return self.variables.get(of[1], of[0]), at + of.end()
        return "$", at + 1

    def parameter(self, inner: str, whole: str) -> str | list[str]:
        """`${…}`: a variable, an array, or one with a default."""
        of = re.match(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=+])(.*))?$", inner, re.DOTALL)
        if of is None:
            return whole
        name, default = of[1], of[4]
        value = [] if name in "@*" else self.variables.get(name)
        if of[3] and of[3].endswith("+"):
            return self.text(default) if value else ""
        if value is None or (value == "" and of[3] and of[3].startswith(":")):
            return self.text(default) if of[3] else [] if of[2] else whole
        return value

    def arithmetic(self, expression: str) -> str:
        """The value of `$((…))`, or the same words if a number is missing."""
        named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda of: str(self.variables.get(of[1], of[0])), expression)
        try:
            return str(_number(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return f"$(({expression}))"


def _fields(pieces: Iterable[tuple[str | list[str], bool]]) -> list[str]:
    """Words of pieces that stand side by side: cut at blanks, except in those that are quoted."""
    fields: list[str] = []
    now: list[str] | None = None  # pieces of the word that is being made
    for text, quoted in pieces:
        for i, one in enumerate(text if isinstance(text, list) else [text]):
            if i:
                fields, now = [*fields, *_ended(now)], None
            if quoted or isinstance(one, Undecided):
                now = [*(now or []), one]
                continue
            first, *rest = re.split(r"\s+", one)
            now = [*(now or []), first] if first or now is not None else now
            for word in rest:
                fields, now = [*fields, *_ended(now)], [word] if word else None
    return [*fields, *_ended(now)]


def _ended(pieces: list[str] | None) -> list[str]:
    return [] if pieces is None else [_joined(pieces)]


def _joined(pieces: Sequence[str]) -> str:
    """One word of its pieces; undecided if one of them is."""
    unsure = next((one for one in pieces if isinstance(one, Undecided)), None)
    text = "".join(pieces)
    return Undecided(text, unsure.condition, unsure.flags) if unsure is not None else text


def _spread(word: str) -> list[str]:
    """A word that may stand for flags, as these flags."""
    if isinstance(word, Undecided) and word.flags:
        return [Undecided(flag, word.condition) for flag in word.flags]
    return [word]


def split_word(word: str) -> list[str]:
    """The words between blanks; an undecided one is not split."""
    return [word] if isinstance(word, Undecided) else word.split()


def _number(tree: ast.expr) -> int:
    if isinstance(tree, ast.Constant):
        return int(tree.value)
    if isinstance(tree, ast.UnaryOp):
        return ARITHMETIC[type(tree.op)](_number(tree.operand))
    if isinstance(tree, ast.BinOp):
        return ARITHMETIC[type(tree.op)](_number(tree.left), _number(tree.right))
    raise ValueError("not a number")
