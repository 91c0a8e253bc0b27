"""A shell script as a tree: commands, branches, loops, functions; `book.explain.shell_words` says what words mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from book.explain.shell_tokens import Array, Token, tokens_of


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
    return _Parser(tokens_of(text)).block(())


# ---- statements -----------------------------------------------------------------------------------------------------


class _Parser:
    """Tokens, from which statements are taken one by one."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        """The text of the next token, or nothing at the end."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def take(self) -> Token:
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
    if len(left) == 1 and _is_test(left[0]):
        return [both]
    right = both.yes or both.no
    if len(left) == 1 and isinstance(left[0], Branch):  # test && a || b
        before = left[0]
        if joined == "||":
            return [before if before.no else before._replace(no=right)]
        return [before._replace(yes=[*before.yes, *right])] if before.yes else [before, *right]
    return [*left, *(right if joined == "&&" else [])]


def _is_test(statement: Statement) -> bool:
    """Whether it only answers a question: `[ … ]`, or several joined."""
    if isinstance(statement, Branch):
        return all(_is_test(one) for one in (*statement.condition, *statement.yes, *statement.no))
    first = str(statement.words[0]) if isinstance(statement, Command) and statement.words else ""
    return first.startswith(("[", "((")) or first in ("test", "!", "true", "false")
