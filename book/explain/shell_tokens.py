"""A shell script as words and operators: where a word ends, with quotes and brackets; without comments."""

from __future__ import annotations

import re
from typing import NamedTuple

OPERATORS = re.compile(r"&&|\|\||;;|[;|&()]")
REDIRECT = re.compile(r"(?:\d*|&)(?:>>?|<)&?-?")
HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


class Array(NamedTuple):
    """`name=(words)`, or `name+=(words)`, which adds `more`."""

    name: str
    more: bool
    words: list[str]


class Token(NamedTuple):
    """A word; an array that is assigned; a text behind `<<`; or an operator, such as the end of a line."""

    text: str
    array: Array | None = None
    document: str | None = None
    operator: bool = False


def tokens_of(text: str) -> list[Token]:
    """Words, operators and ends of lines; without comments and redirections."""
    found: list[Token] = []
    waiting: list[tuple[int, str]] = []  # places of texts behind `<<`, and the words that end them
    at = 0
    while at < len(text):
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] == "\n":
            found.append(Token("\n", operator=True))
            at += 1
            for place, end in waiting:
                body, _, rest = re.sub(rf"^\s*{end}\s*$", "\0", text[at:], count=1, flags=re.MULTILINE).partition(
                    "\0"
                )
                found[place] = Token("<<", document=body)
                at = len(text) - len(rest)
            waiting = []
        elif text[at].isspace():
            at += 1
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif text.startswith("((", at) and "))" in text[at:]:
            end = text.index("))", at) + 2
            found.append(Token(text[at:end]))
            at = end
        elif (of := HERE.match(text, at)) and not text.startswith("<<<", at):
            waiting.append((len(found), of[2]))
            found.append(Token("<<", document=""))
            at = of.end()
        elif of := REDIRECT.match(text, at):
            at = of.end()
            if not of[0].endswith("-") and not re.match(r"\d", text[at:]):
                at = _word(text, _blank(text, at))
            elif text[at : at + 1].isdigit():
                at += 1
        elif of := OPERATORS.match(text, at):
            found.append(Token(of[0], operator=True))
            at = of.end()
        else:
            end = _word(text, at)
            if (of := re.fullmatch(r"(\w+)(\+?)=", text[at:end])) and text.startswith("(", end):
                inner, end = _array(text, end + 1)
                found.append(Token(text[at:end], Array(of[1], bool(of[2]), inner)))
            else:
                found.append(Token(text[at:end].replace("\\\n", "")))
            at = end
    return found


def _blank(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip(" \t"))


def _array(text: str, at: int) -> tuple[list[str], int]:
    """The words up to the closing parenthesis, and where it ends."""
    words = []
    while at < len(text):
        if text[at] == ")":
            return words, at + 1
        if text.startswith("\\\n", at):
            at += 2
        elif text[at].isspace():
            at += 1
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        else:
            end = max(_word(text, at), at + 1)
            words.append(text[at:end])
            at = end
    raise ValueError("an array lacks its closing parenthesis")


def _word(text: str, at: int) -> int:
    """Where a word ends: at a blank or an operator outside of quotes and brackets."""
    start = at
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`":
            at = quoted_end(text, at)
        elif text.startswith(("$(", "${"), at):
            at = bracket_end(text, at + 1)
        elif text[at].isspace() or text[at] in ";|&()<>":
            return at
        else:
            at += 1
    return max(at, start)


def quoted_end(text: str, at: int) -> int:
    """Behind the quote that ends the one at this place, with commands and variables inside."""
    mark, start = text[at], at
    at += 1
    while at < len(text):
        if text[at] == mark:
            return at + 1
        if mark == '"' and text.startswith(("$(", "${"), at):
            at = bracket_end(text, at + 1)
        else:
            at += 2 if text[at] == "\\" and mark != "'" else 1
    raise ValueError(f"the quote before {text[start : start + 30]!r} does not end")


def bracket_end(text: str, at: int) -> int:
    """Behind the bracket that closes the one at this place, with quotes and brackets inside."""
    start, close = at, {"(": ")", "{": "}"}[text[at]]
    at += 1
    while at < len(text):
        if text[at] == close:
            return at + 1
        if text[at] in "'\"":
            at = quoted_end(text, at)
        elif text[at] == text[start]:
            at = bracket_end(text, at)
        else:
            at += 2 if text[at] == "\\" else 1
    raise ValueError(f"{text[start - 1 : start + 30]!r} lacks a closing {close}")
