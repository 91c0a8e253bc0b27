"""The commands that a shell script runs, as words: with its variables, arrays, quotes, defaults and branches.

The problem: the flags of a run are in arrays and variables, and an `if` says which of them count; whoever takes the
last assignment reads another run. The idea: go through the script as a shell does, with the variables that it sets. A
condition that hangs on something outside of the script has no answer here: then both sides run, and what differs
between them is `Undecided`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import NamedTuple

from book.explain.shell_syntax import Array, Branch, CaseOf, Command, Function, Loop, Statement, script_tree
from book.explain.shell_words import Expander, Undecided, split_word

COMPARED = {
    **dict.fromkeys(("=", "==", "-eq"), operator.eq),
    **dict.fromkeys(("!=", "-ne"), operator.ne),
    **{"-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
MOST_COMMANDS = 500
SETS = {"export", "local", "declare", "readonly", "typeset"}
SCRIPT_READERS = {"sbatch", "bash", "sh", "srun"}  # run what is behind `<<`


class Commands(NamedTuple):
    """What a script runs.

    Args:
        run: the words of each command, in order; a word that nothing decides is `Undecided`.
        files: of other scripts that it reads.
        unused: words of the variables that no command mentions, by name.
    """

    run: list[list[str]]
    files: list[str]
    unused: dict[str, list[str]]


def commands(text: str) -> Commands:
    """The commands of a script, as far as the script itself decides them.

    Raises:
        ValueError: a quote, a parenthesis or a branch without an end; loops without one.
    """
    shell = _Shell()
    try:
        shell.block(script_tree(text))
    except _Exit:
        pass
    except RecursionError:
        raise ValueError("its functions call themselves without an end") from None
    named = set(re.findall(r"\$\{?[#!]?(\w+)", text))
    unused = {name: _listed(value) for name, value in shell.variables.items() if name not in named}
    return Commands(shell.run, shell.files, unused)


class _Exit(Exception):
    """The script ends here."""


class _Shell(Expander):
    """A walk through a script, with the variables that it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, list[Statement]] = {}
        self.run: list[list[str]] = []
        self.files: list[str] = []

    def block(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, Command):
            self.command(statement)
        elif isinstance(statement, Function):
            self.functions[statement.name] = statement.body
        elif isinstance(statement, Loop):
            self.loop(statement)
        elif isinstance(statement, CaseOf):
            self.case(statement)
        else:
            self.branch(statement)

    def loop(self, loop: Loop) -> None:
        """Run the body for each word that is known; a loop over the arguments of the script does nothing."""
        words = [word for raw in loop.words for word in self.words(raw)]
        if re.search(r"\$[@*#]|\bgetopts\b|\bread\b", loop.text) and not words:
            return
        if not loop.name or any("$" in word or isinstance(word, Undecided) for word in words):
            self.either(loop.text, [loop.body, []])
            return
        for word in words:
            self.variables[loop.name] = word
            self.block(loop.body)

    def branch(self, branch: Branch) -> None:
        """Run the side that the condition decides, or both."""
        answer = self.answer(branch.condition)
        if answer is not None:
            self.block(branch.yes if answer else branch.no)
        else:
            self.either(branch.text, [branch.yes, branch.no])

    def case(self, case: CaseOf) -> None:
        word = " ".join(self.words(case.word))
        patterns = [[" ".join(self.words(one)) for one in patterns] for patterns, _ in case.sides]
        if "$" not in word and not isinstance(word, Undecided):
            for of, (_, body) in zip(patterns, case.sides, strict=True):
                if any(re.fullmatch(re.escape(one).replace(r"\*", ".*").replace(r"\?", "."), word) for one in of):
                    return self.block(body)
            return None
        otherwise = [] if ["*"] in patterns else [[]]
        return self.either(f"case {case.word}", [body for _, body in case.sides] + otherwise)

    def either(self, condition: str, sides: Sequence[Sequence[Statement]]) -> None:
        """Run each of the sides from the same start, except those that end the script; keep what they agree on."""
        before, ends, ran = dict(self.variables), [], list(self.run)
        for side in sides:
            self.variables, self.run = dict(before), list(ran)
            try:
                self.block(side)
            except _Exit:
                continue
            ends.append((self.variables, self.run[len(ran) :]))
        self.variables, self.run = before, ran
        for _, more in ends:
            self.run += [[Undecided(word, condition) if more != ends[0][1] else word for word in one] for one in more]
            if all(other == ends[0][1] for _, other in ends):
                break
        for name in dict.fromkeys(name for variables, _ in ends for name in variables):
            values = [variables.get(name) for variables, _ in ends]
            if all(value == values[0] for value in values):
                self.variables[name] = values[0]
            elif any(isinstance(value, list) for value in values):
                self.variables[name] = _merged([_listed(value) for value in values], condition)
            else:
                words = [word for value in values for word in str(value or "").split()]
                self.variables[name] = Undecided(f"${name}", condition, _flags(words))

    def command(self, command: Command) -> None:
        """Assign, or keep the words of a command; call a function; remember a script that is read."""
        words: list[str] = []
        for raw in command.words:
            if isinstance(raw, Array):
                items = [word for one in raw.words for word in self.words(one)]
                before = self.variables.get(raw.name, []) if raw.more else []
                self.variables[raw.name] = [*([before] if isinstance(before, str) else before), *items]
            elif (of := re.match(r"(\w+)(\+?)=", raw)) and set(words) <= SETS:
                value, before = self.text(raw[of.end() :]), self.variables.get(of[1], "") if of[2] else ""
                many = isinstance(value, list) or isinstance(before, list)
                self.variables[of[1]] = [*_listed(before), *_listed(value)] if many else before + value
            else:
                words += self.words(raw)
        if not words or words[0] in SETS:
            return
        name, *rest = words
        if name in ("exit", "return"):
            raise _Exit
        if name == "unset":
            for one in rest:
                self.variables.pop(one, None)
        elif name in ("source", ".") and rest:
            self.files.append(rest[0])
        elif name in self.functions:
            try:
                self.block(self.functions[name])
            except _Exit:
                pass
        else:
            self.run.append(words)
            if len(self.run) > MOST_COMMANDS:
                raise ValueError(f"its loops run more than {MOST_COMMANDS} commands")
        for body in command.documents:
            if name in SCRIPT_READERS:
                self.block(script_tree(body))

    # ---- conditions -----------------------------------------------------------------------------------------------

    def answer(self, condition: Sequence[Statement] | Branch) -> bool | None:
        """Whether the condition holds, or None if the script does not say."""
        if isinstance(condition, Branch):  # a && b, a || b
            left, right = self.answer(condition.condition), self.answer(condition.yes or condition.no)
            both = bool(condition.yes)
            if left is None or right is None:
                return (not both) if (not both) in (left, right) else None
            return (left and right) if both else (left or right)
        if len(condition) != 1 or not isinstance(condition[0], Command):
            return self.answer(condition[0]) if len(condition) == 1 and isinstance(condition[0], Branch) else None
        raw = [one for one in condition[0].words if isinstance(one, str)]
        if raw and raw[0] == "!":
            inner = self.answer([Command(raw[1:], [])])
            return None if inner is None else not inner
        if raw and raw[0].startswith("(("):
            return self.compared(re.findall(r"[\w${}]+|[<>=!]=?", raw[0][2:-2]))
        if raw in (["true"], ["false"]):
            return raw == ["true"]
        if not raw or raw[0] not in ("[", "[[", "test"):
            return None
        return self.compared([one for one in raw[1:] if one not in ("]", "]]")])

    def compared(self, raw: Sequence[str]) -> bool | None:
        """A comparison, or several with `&&`, `||`, `-a` and `-o` between them."""
        for words, when in (("||", "-o"), True), (("&&", "-a"), False):
            if at := next((i for i, one in enumerate(raw) if one in words), 0):
                left, right = self.compared(raw[:at]), self.compared(raw[at + 1 :])
                return when if when in (left, right) else None if None in (left, right) else not when
        if raw and raw[0] == "!":
            inner = self.compared(raw[1:])
            return None if inner is None else not inner
        values = [self.text(one) for one in raw]
        if any(isinstance(one, list | Undecided) or "$" in one for one in values):
            return None
        if len(values) == 2 and values[0] in ("-n", "-z"):
            return bool(values[1]) == (values[0] == "-n")
        if len(values) == 1:
            return values[0] not in ("", "0") if raw[0].isdecimal() else bool(values[0])
        if len(values) == 3 and values[1] in COMPARED:
            a, b = values[0], values[2]
            if re.fullmatch(r"-?\d+", a) and re.fullmatch(r"-?\d+", b):
                return COMPARED[values[1]](int(a), int(b))
            return COMPARED[values[1]](a, b) if values[1] in ("=", "==", "!=") and "*" not in b else None
        return None


def _listed(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else split_word(value or "")


def _flags(words: Sequence[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith("--")]


def _merged(values: Sequence[Sequence[str]], condition: str) -> list[str]:
    """Arrays that differ: their common beginning, and undecided flags."""
    same = 0
    while all(len(one) > same and one[same] == values[0][same] for one in values):
        same += 1
    rest = [word for one in values for element in one[same:] for word in split_word(element)]
    return [*values[0][:same], *(Undecided(flag, condition) for flag in _flags(rest))]
