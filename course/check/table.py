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
    names = {name: [f"{row} {name}: {column}" for column in columns] or [f"{row} {name}"] for name in table}

    right_ones = {n: x for name in table for n, x in zip(names[name], table[name], strict=True)}
    as_written = {x.lower(): x for x in right_ones.values() if isinstance(x, str)}

    def shown(entry: Any) -> Any:
        entry = word(entry)
        return "None" if entry is None else as_written.get(entry, entry) if isinstance(entry, str) else entry

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
        rows = [[entry if n == wrong else right_ones[n] for n in of_row] for of_row in names.values()]
        return lambda: rows if columns else [x for (x,) in rows]

    def in_other_types() -> tuple:
        return tuple(
            tuple(x.swapcase() if isinstance(x, str) else x and float(x) for x in xs) for xs in table.values()
        )

    def mistake(hint: str, repair: str, place: str, written: str) -> Mistake:
        (name, _, column), entry = place.partition(" "), ast.literal_eval(written)
        whole = f"{row} {name}" + f": {column}" * bool(column)
        if right_ones.get(whole, entry) == entry:
            raise ValueError(f"{place}: {written} is no mistake: the right entries are {right_ones}")
        hint, repair = (said.replace("{}", str(entry)) for said in (hint, repair))
        return Mistake(f"{row} {name}: {hint}", answer(whole, entry), (whole,), repair=repair)

    def mistakes() -> Iterator[Mistake]:
        for alternatives, hint, repair in entries(listed):
            for lines in alternatives:
                if len(lines) > 1:
                    raise ValueError(f"{lines[1]}: write `or` above it")
                place, _, wrong = lines[0].partition(": ")
                yield from (mistake(hint, repair, place, written) for written in wrong.split(" | "))

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
