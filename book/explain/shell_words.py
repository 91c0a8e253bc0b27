"""The words of a shell script: what quotes, variables, arrays, defaults and arithmetic stand for."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Sequence

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
        fields: list[str] = []
        now: list[str] | None = None  # pieces of the word that is being made
        for text, quoted in self.pieces(raw):
            if isinstance(text, list):  # an array: each element is a word
                elements = text if quoted else [one for element in text for one in split_word(element)]
                fields += elements
            elif quoted or isinstance(text, Undecided):
                now = [*(now or []), text]
            else:
                first, *rest = re.split(r"\s+", text)
                now = [*(now or []), first] if first or now is not None else now
                for one in rest:
                    fields += [] if now is None else [_joined(now)]
                    now = [one] if one else None
        fields += [] if now is None else [_joined(now)]
        return [one for field in fields for one in _spread(field)]

    def text(self, raw: str) -> str:
        """The value of an assignment, which is not split into words."""
        pieces = [" ".join(text) if isinstance(text, list) else text for text, _ in self.pieces(raw)]
        return _joined(pieces) if pieces else ""

    def pieces(self, raw: str) -> Iterator[tuple[str | list[str], bool]]:
        """Pieces of a word, with the values of variables, and whether each is quoted."""
        pattern = re.compile(r"'([^']*)'|\"((?:\\.|\$\([^)]*\)|[^\"\\])*)\"|\\(.)|(\$)|([^'\"\\$]+)", re.DOTALL)
        at = 0
        while at < len(raw):
            of = pattern.match(raw, at)
            if of is None:
                raise ValueError(f"the quotes of {raw!r} do not end")
            if of[4]:
                text, at = self.value(raw, at)
                yield text, isinstance(text, str) and text.startswith("$")  # what nothing sets stays one word
                continue
            at = of.end()
            if of[2] is not None:
                yield from self.inside(of[2])
            else:
                yield of[1] if of[1] is not None else of[3] or of[5], of[5] is None

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
            end = _closing(rest, 1, "()")
            return rest[:end], at + end
        if rest.startswith("${"):
            end = _closing(rest, 1, "{}")
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


def _closing(text: str, at: int, pair: str) -> int:
    """Behind the bracket that closes the one at this place."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if not depth:
            return i + 1
    raise ValueError(f"{text[:40]!r} lacks a closing {pair[1]}")


def _number(tree: ast.expr) -> int:
    if isinstance(tree, ast.Constant):
        return int(tree.value)
    if isinstance(tree, ast.UnaryOp):
        return ARITHMETIC[type(tree.op)](_number(tree.operand))
    if isinstance(tree, ast.BinOp):
        return ARITHMETIC[type(tree.op)](_number(tree.left), _number(tree.right))
    raise ValueError("not a number")
