"""Exercises in which the answer is a small table of what the learner found: a mistake is a wrong entry, and its hint.

    A rank: 0 | 2
        rank {} waits for a gradient. Look for a rank that could continue.

The list is that of `course.check.edits`, with rows, columns and their wrong entries above a hint. In the hint, `{}` is
the entry; the words of the row come before it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from course.check.edits import entries
from course.check.exercise import Data, Exercise, Mistake, kind, several, word


def findings(
    number: str, title: str, row: str, columns: Sequence[str], right: dict[str, tuple], listed: str, points: float = 2
) -> Exercise:
    """The exercise whose answer is a tuple for each row.

    Args:
        number, title, points: as of any `Exercise`.
        row: what a hint calls a row, such as "Run".
        columns: the name of each entry.
        right: row, one word -> its entries: numbers, words in any case, or None.
        listed: the mistakes, as the head of this file says.

    Raises:
        ValueError: a mistake in a row or column that does not exist, or one that is right.
    """

    def body(answer: Callable, group: Any, given: Data) -> Data:
        result = answer()
        found: Data = {"what was returned": kind(result)}
        for name, got in zip(right, several(result, len(right)), strict=True):
            found[f"{row} {name}"] = kind(got)
            if found[f"{row} {name}"] == kind(columns):
                shown = ("None" if x is None else word(x) for x in several(got, len(columns)))
                found |= {f"{row} {name}: {column}": x for column, x in zip(columns, shown, strict=True)}
        return found

    def answer(name: str = "", column: str = "", entry: Any = None) -> Callable:
        """The right table, but for this entry."""
        rows = {r: dict(zip(columns, xs, strict=True)) for r, xs in right.items()}
        rows |= {name: rows[name] | {column: entry}} if name else {}
        return lambda: [[*xs.values()] for xs in rows.values()]

    def in_other_types() -> tuple:
        return tuple(
            tuple(x.swapcase() if isinstance(x, str) else x and float(x) for x in xs) for xs in right.values()
        )

    def mistake(hint: str, place: str, written: str) -> Mistake:
        (name, column), entry = place.split(" ", 1), ast.literal_eval(written)
        if column not in columns or right[name][columns.index(column)] == entry:
            raise ValueError(
                f"{place}: {written} is no mistake: the columns are {columns}, the right row {right[name]}"
            )
        hint = f"{row} {name}: {hint.replace('{}', str(entry))}"
        return Mistake(hint, answer(name, column, entry), (f"{row} {name}: {column}",))

    return Exercise(
        id=number,
        title=title,
        points=points,
        body=body,
        inputs=lambda generator, n: [{}],
        ranks=(1,),
        right=(answer(), in_other_types),
        mistakes=tuple(
            mistake(hint, place, written)
            for alternatives, hint in entries(listed)
            for line in sum(alternatives, [])
            for place, _, wrong in [line.partition(": ")]
            for written in wrong.split(" | ")
        ),
    )
