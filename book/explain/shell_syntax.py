"""A shell script as a tree: commands, branches, loops, functions; `book.explain.shell_words` says what words mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OPERATORS = re.compile(r"&&|\|\||;;|[;|&()]")
REDIRECT = re.compile(r"(?:\d*|&)(?:>>?|<)&?-?")
HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


class Array(NamedTuple):
    """`name=(words)`, or `name+=(words)`, which adds `more`."""

    name: str
    more: bool
    words: list[str]


class Command(NamedTuple):
    """A command: its words as they are written; `documents` are texts behind `<<`."""

    words: list[str | Array]
    documents: list[str]


class Branch(NamedTuple):
    """`if`, `&&` or `||`; `text` is the condition as it is written."""

    text: str
    condition: list[Statement]
    yes: list[Statement]
    no: list[Statement]


class CaseOf(NamedTuple):
    """`case`: the body for each list of patterns."""

    word: str
    sides: list[tuple[list[str], list[Statement]]]


class Loop(NamedTuple):
    """`for`, `while` and `until`; `for` sets `name` to each of `words`."""

    text: str
    name: str
    words: list[str]
    body: list[Statement]


class Function(NamedTuple):
    """`name() { body }`."""

    name: str
    body: list[Statement]


Statement = Command | Branch | CaseOf | Loop | Function


def script_tree(text: str) -> list[Statement]:
    """The statements of a script.

    Raises:
        ValueError: a quote, a parenthesis or a branch without an end.
    """
    return _Parser(_tokens(text)).block(())


# ---- tokens ---------------------------------------------------------------------------------------------------------


class _Token(NamedTuple):
    text: str
    array: Array | None = None
    document: str | None = None
    operator: bool = False


def _tokens(text: str) -> list[_Token]:
    """Words, operators and ends of lines; without comments and redirections."""
    found: list[_Token] = []
    waiting: list[tuple[int, str]] = []  # places of texts behind `<<`, and the words that end them
    at = 0
    while at < len(text):
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] == "\n":
            found.append(_Token("\n", operator=True))
            at += 1
            for place, end in waiting:
                body, _, rest = re.sub(rf"^\s*{end}\s*$", "\0", text[at:], count=1, flags=re.MULTILINE).partition(
                    "\0"
                )
                found[place] = _Token("<<", document=body)
                at = len(text) - len(rest)
            waiting = []
        elif text[at].isspace():
            at += 1
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif text.startswith("((", at) and "))" in text[at:]:
            end = text.index("))", at) + 2
            found.append(_Token(text[at:end]))
            at = end
        elif (of := HERE.match(text, at)) and not text.startswith("<<<", at):
            waiting.append((len(found), of[2]))
            found.append(_Token("<<", document=""))
            at = of.end()
        elif of := REDIRECT.match(text, at):
            at = of.end()
            if not of[0].endswith("-") and not re.match(r"\d", text[at:]):
                at = _word(text, _blank(text, at))
            elif text[at : at + 1].isdigit():
                at += 1
        elif of := OPERATORS.match(text, at):
            found.append(_Token(of[0], operator=True))
            at = of.end()
        else:
            end = _word(text, at)
            if (of := re.fullmatch(r"(\w+)(\+?)=", text[at:end])) and text.startswith("(", end):
                inner, end = _array(text, end + 1)
                found.append(_Token(text[at:end], Array(of[1], bool(of[2]), inner)))
            else:
                found.append(_Token(text[at:end].replace("\\\n", "")))
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
            at = _quoted(text, at)
        elif text.startswith(("$(", "${"), at):
            at = _bracket(text, at + 1)
        elif text[at].isspace() or text[at] in ";|&()<>":
            return at
        else:
            at += 1
    return max(at, start)


def _quoted(text: str, at: int) -> int:
    mark, start = text[at], at
    at += 1
    while at < len(text):
        if text[at] == mark:
            return at + 1
        if mark == '"' and text.startswith(("$(", "${"), at):
            at = _bracket(text, at + 1)
        else:
            at += 2 if text[at] == "\\" and mark != "'" else 1
    raise ValueError(f"the quote before {text[start : start + 30]!r} does not end")


def _bracket(text: str, at: int) -> int:
    """Behind the bracket that closes the one at this place, with quotes and brackets inside."""
    start, close = at, {"(": ")", "{": "}"}[text[at]]
    at += 1
    while at < len(text):
        if text[at] == close:
            return at + 1
        if text[at] in "'\"":
            at = _quoted(text, at)
        elif text[at] == text[start]:
            at = _bracket(text, at)
        else:
            at += 2 if text[at] == "\\" else 1
    raise ValueError(f"{text[start - 1 : start + 30]!r} lacks a closing {close}")


# ---- statements -----------------------------------------------------------------------------------------------------


class _Parser:
    """Tokens, from which statements are taken one by one."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        """The text of the next token, or nothing at the end."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def take(self) -> _Token:
        if self.at == len(self.tokens):
            raise ValueError("it ends inside of an if, a case or a loop")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, word: str) -> None:
        while self.peek() in ("\n", ";") and word not in ("\n", ";"):
            self.take()
        if (said := self.take().text) != word:
            raise ValueError(f"{said!r} stands where {word!r} should be")

    def block(self, stops: Sequence[str]) -> list[Statement]:
        """Statements up to one of the words, which is left."""
        found: list[Statement] = []
        while True:
            while self.peek() in ("\n", ";", "&", "|"):
                self.take()
            if self.peek() in stops or (not stops and self.at == len(self.tokens)):
                return found
            start = self.at
            statements = self.one()
            while self.peek() in ("&&", "||"):
                joined = self.take().text
                text, start = self.written(start, self.at - 1), self.at
                while self.peek() == "\n":
                    self.take()
                right = self.one()
                sides = (right, []) if joined == "&&" else ([], right)
                statements = _after(statements, joined, Branch(text, statements, *sides))
            found += statements

    def written(self, start: int, end: int) -> str:
        return " ".join(one.text for one in self.tokens[start:end]).strip("\n; ")

    def one(self) -> list[Statement]:
        word = self.peek()
        if word == "if":
            return [self.branch()]
        if word == "case":
            return [self.case()]
        if word in ("for", "while", "until", "select"):
            return [self.loop()]
        if word in ("{", "("):
            self.take()
            body = self.block(("}" if word == "{" else ")",))
            self.take()
            return body
        ahead = [one.text for one in self.tokens[self.at : self.at + 4]]
        if word == "function" or ahead[1:3] == ["(", ")"]:
            self.at += word == "function"
            name = self.take().text
            while self.peek() in ("(", ")", "\n"):
                self.take()
            return [Function(name, self.one())]
        return [self.command()]

    def command(self) -> Command:
        words, documents = [], []
        tests = self.peek() == "[["
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.operator and not (tests and "]]" not in words):
                break
            self.at += 1
            if token.document is not None:
                documents.append(token.document)
            else:
                words.append(token.array or token.text)
        if not words and not documents:
            self.take()  # a bracket that nothing opened
        return Command(words, documents)

    def branch(self) -> Branch:
        """From `if` or `elif` to `fi`."""
        self.take()
        start = self.at
        condition = self.block(("then",))
        text = self.written(start, self.at)
        self.expect("then")
        yes, no = self.block(("elif", "else", "fi")), []
        if self.peek() == "elif":
            return Branch(text, condition, yes, [self.branch()])
        if self.peek() == "else":
            self.take()
            no = self.block(("fi",))
        self.expect("fi")
        return Branch(text, condition, yes, no)

    def case(self) -> CaseOf:
        self.take()
        word = self.take().text
        self.expect("in")
        sides = []
        while True:
            while self.peek() in ("\n", ";;", ";", "("):
                self.take()
            if self.peek() == "esac":
                self.take()
                return CaseOf(word, sides)
            patterns = [self.take().text]
            while (said := self.take().text) != ")":
                patterns += [said] if said != "|" else []
            sides.append((patterns, self.block((";;", "esac"))))

    def loop(self) -> Loop:
        kind, start = self.take().text, self.at
        while self.peek() != "do":
            self.take()
        text = f"{kind} {self.written(start, self.at)}"
        head = [one.text for one in self.tokens[start : self.at] if not one.operator]
        self.expect("do")
        body = self.block(("done",))
        self.take()
        named = kind == "for" and head[1:2] == ["in"]
        return Loop(text, head[0] if named else "", head[2:] if named else [], body)


def _after(left: list[Statement], joined: str, both: Branch) -> list[Statement]:
    """`a && b` and `a || b`: a test decides; any other command is taken to succeed."""
    test = left[0] if len(left) == 1 else None
    words = test.words if isinstance(test, Command) else [""]
    if isinstance(test, Branch) or (words and str(words[0]).startswith(("[", "((", "test", "!", "true", "false"))):
        return [both]
    return [*left, *(both.yes if joined == "&&" else [])]
