"""Exercises in which the answer is a small table of what the learner found: a mistake is a wrong entry, and its hint.

    A rank: 0 | 2
    or
    B rank: 1
        rank {} waits for a gradient.
            Look for a rank that could continue.

The list is that of `course.check.edits`, with a row, a column and its wrong entries above a hint. In the hint and below
it, `{}` is the entry; the words of the row come before the hint. A table of one column has no name for it: `A: 0 | 2`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from course.check.compare import Data
from course.check.edits import entries
from course.check.exercise import Exercise, Mistake, kind, several, word


def findings(
    number: str, title: str, row: str, columns: Sequence[str], right: dict[str, Any], listed: str, points: float = 2
) -> Exercise:
    """The exercise whose answer is a tuple for each row, or in a table of one column its entry.

    Args:
        number, title, points: as of any `Exercise`.
        row: what a hint calls a row, such as "Run".
        columns: the name of each entry; none where a row is one entry.
        right: row, one word -> its entries: numbers, words in any case, or None.
        listed: the mistakes, as the head of this file says.

    Raises:
        ValueError: a mistake in a row or column that does not exist, one that is right, or two without `or` between.
    """
    table = {name: tuple(entry) if columns else (entry,) for name, entry in right.items()}
    names: dict[str, list[str]] = {}  # row -> the name of each of its entries
    right_ones: dict[str, Any] = {}  # name of an entry -> the right one
    for name, entries_of_row in table.items():
        names[name] = [f"{row} {name}: {column}" for column in columns] or [f"{row} {name}"]
        right_ones |= zip(names[name], entries_of_row, strict=True)
    as_written = {entry.lower(): entry for entry in right_ones.values() if isinstance(entry, str)}

    def shown(entry: Any) -> Any:
        """An entry as the table has it; None as a word, because None is also an entry that is not there."""
        entry = word(entry)
        if entry is None:
            return "None"
        return as_written.get(entry, entry) if isinstance(entry, str) else entry

    def body(answer: Callable, group: Any, given: Data) -> Data:
        result = answer()
        found: Data = {"what was returned": kind(result)}
        for name, got in zip(table, several(result, len(table)), strict=True):
            if columns:
                found[f"{row} {name}"] = kind(got)
            elif not isinstance(got, (list, tuple)):
                got = [got]
            if kind(got) == kind(names[name]):
                found |= zip(names[name], map(shown, several(got, len(names[name]))), strict=True)
        return found

    def answer(wrong: str = "", entry: Any = None) -> Callable:
        """The right table, but for this entry."""
        changed = right_ones | {wrong: entry}
        rows = [[changed[name] for name in of_row] for of_row in names.values()]
        return lambda: rows if columns else [only for (only,) in rows]

    def in_other_type(entry: Any) -> Any:
        if isinstance(entry, str):
            return entry.swapcase()
        return float(entry) if entry else entry

    def in_other_types() -> tuple:
        return tuple(tuple(map(in_other_type, of_row)) for of_row in table.values())

    def mistake(hint: str, repair: str, place: str, written: str) -> Mistake:
        name, _, column = place.partition(" ")
        entry = ast.literal_eval(written)
        of_entry = f"{row} {name}: {column}" if column else f"{row} {name}"
        if right_ones.get(of_entry, entry) == entry:
            raise ValueError(f"{place}: {written} is no mistake: the right entries are {right_ones}")
        hint = hint.replace("{}", str(entry))
        repair = repair.replace("{}", str(entry))
        return Mistake(f"{row} {name}: {hint}", answer(of_entry, entry), (of_entry,), repair=repair)

    def mistakes() -> Iterator[Mistake]:
        for wrong_entries, hint, repair in entries(listed):
            for lines in wrong_entries:
                if len(lines) > 1:
                    raise ValueError(f"{lines[1]}: write `or` above it")
                place, _, wrong = lines[0].partition(": ")
                for written in wrong.split(" | "):
                    yield mistake(hint, repair, place, written)

    return Exercise(
        id=number,
        title=title,
        points=points,
        body=body,
        inputs=lambda generator, n: [{}],
        ranks=(1,),
        right=(answer(), in_other_types),
        mistakes=tuple(mistakes()),
    )
