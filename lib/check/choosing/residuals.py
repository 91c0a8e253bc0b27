"""Chapter 14, planners with one wrong formula, found by their errors on published runs: exercise 14.4."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, whole
from lib.mesh import Group
from lib.planner.rows import PUBLISHED, predict, read_rows

_NAME = "wrong_term"
_NOTHING = "nothing"
WRONG_FACTORS: dict[
    str, Callable[[dict], float]
] = {  # of a kind of time, in a row: what the wrong formula makes of it
    "tp": lambda row: row["tp"] / 2,
    "attention": lambda row: 2 if row["flash"] else 1,
    "bubble": lambda row: row["interleave"],
    "dp": lambda row: row["microbatches"],
    "matmuls": lambda row: 3 / 4 if row["recompute"] == "full" else 1,
    "memory": lambda row: 2 / 5,
}
_TERMS = (*WRONG_FACTORS, _NOTHING)
_SHOWN = ("id", "gpu", "gpus", "tp", "pp", "dp", "interleave", "microbatches", "recompute", "flash", "seq", "step_s")
_ROWS, _CLEAR = 36, 1.05
_LEFT_OUT = {"aa", "zb"}  # one was not calibrated, on a shared network; the other has neither tp nor dp

Score = Callable[[Sequence[float], Sequence[dict]], float]
Factors = Callable[[dict, str], float]


@lru_cache(maxsize=1)
def _published() -> tuple[dict, ...]:
    rows = (row for row in read_rows(PUBLISHED / "runs.json") if row["stack"] not in _LEFT_OUT)
    return tuple({name: row[name] for name in _SHOWN} | {"seconds": predict(row).seconds._asdict()} for row in rows)


def _planted(row: dict, term: str) -> dict:
    """A row as a planner predicts it that has this term wrong."""
    seconds = row["seconds"]
    return row | {"seconds": seconds if term == _NOTHING else seconds | {term: seconds[term] * _factor(row, term)}}


def _factor(row: dict, term: str) -> float:
    return WRONG_FACTORS[term](row)


def _scores(rows: Sequence[dict], score: Score, undo: Factors | None = None) -> dict[str, float]:
    """Term → how far off the planner is once this term is corrected."""
    undo = undo or (lambda row, term: 1 / _factor(row, term))

    def error(row: dict, term: str) -> float:
        more = 0.0 if term == _NOTHING else row["seconds"][term] * (undo(row, term) - 1)
        return (sum(row["seconds"].values()) + more) / row["step_s"] - 1

    return {term: score([error(row, term) for row in rows], rows) for term in _TERMS}


def _median(errors: Sequence[float], rows: Sequence[dict]) -> float:
    return median(map(abs, errors))


def _mean(errors: Sequence[float], rows: Sequence[dict]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _by(score: Score, undo: Factors | None = None, terms: Sequence[str] = _TERMS) -> Callable[[list[dict]], str]:
    """The term whose correction helps most, by such a score."""

    def found(rows: list[dict]) -> str:
        scores = _scores(rows, score, undo)
        return min(terms, key=lambda term: scores[term])

    return found


def _largest_kind(rows: list[dict]) -> str:
    return max(WRONG_FACTORS, key=lambda term: sum(row["seconds"][term] for row in rows))


_METHODS = {
    "largest": _largest_kind,
    "first": _by(lambda errors, rows: abs(errors[0])),
    "worst": _by(lambda errors, rows: max(map(abs, errors))),
    "signed": _by(lambda errors, rows: abs(median(errors))),
    "seconds": _by(lambda errors, rows: sum(abs(e) * row["step_s"] for e, row in zip(errors, rows, strict=True))),
    "always": _by(_median, terms=tuple(WRONG_FACTORS)),
    "again": _by(_median, undo=_factor),
}


def _rows_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Runs by which each wrong formula is clearly found, and none of the wrong methods finds all of them."""
    rng = random.Random(whole(generator, 0, 2**40))
    while True:
        rows = rng.sample(_published(), _ROWS)
        terms = rng.sample(_TERMS, len(_TERMS))
        given = [[_planted(row, term) for row in rows] for term in terms]
        found = [terms, *([method(rows) for rows in given] for method in _METHODS.values())]
        differ = all(found[i] != found[j] for i in range(len(found)) for j in range(i))
        if differ and all(_is_clear(rows, term) for rows, term in zip(given, terms, strict=True)):
            return [{"planners": given, "terms": terms}]


def _is_clear(rows: list[dict], term: str) -> bool:
    """By the median of the errors as well as by their mean."""
    for score in (_median, _mean):
        scores = _scores(rows, score)
        if min(scores[other] for other in _TERMS if other != term) < _CLEAR * scores[term]:
            return False
    return True


def _wrong_term(answer: Callable, group: Group, given: Data) -> Data:
    return _entries(answer(rows) for rows in given["planners"])


def _entries(terms: Any) -> Data:
    return {f"planner {i}": term for i, term in enumerate(terms, 1)}


def _method(name: str, hint: str) -> Mistake:
    return Mistake(hint, lambda given, want: [_entries(map(_METHODS[name], given[0]["planners"]))])


WRONG_TERM = Exercise(
    id="14.4",
    title=_NAME,
    points=3,
    body=_wrong_term,
    inputs=_rows_inputs,
    reference=lambda given: [_entries(given[0]["terms"])],
    ranks=(1,),
    mistakes=(
        _method(
            "largest",
            "You name the kind that takes most of the time. It is the largest in every planner, right or wrong: ask "
            "which correction makes the errors smaller.",
        ),
        _method(
            "first",
            "You judge by the first run alone. A single run is explained by several corrections, and by chance: a "
            "wrong formula shows in all runs that have its property.",
        ),
        _method(
            "worst",
            "You judge by the worst run. It is off for a reason that no formula here knows, so a wrong correction "
            "that hides it looks good. Take the median or the mean.",
        ),
        _method(
            "signed",
            "You let errors of both signs cancel. A planner 20% too fast on half of the runs and 20% too slow on the "
            "other half is not right: take absolute values first.",
        ),
        _method(
            "seconds",
            "You add up seconds. Then the few runs with the longest steps decide. Divide each difference by the "
            "measured seconds of its run.",
        ),
        _method(
            "always",
            'You always find something. One of the planners is right: compare each correction with none, "nothing".',
        ),
        _method(
            "again",
            "You apply each wrong factor a second time. To undo it, divide the kind by it.",
        ),
    ),
)

EXERCISES = (WRONG_TERM,)
