"""14.4: the one wrong formula of a planner, found by its errors on published runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch

import lib
from course.check.exercise import Data, Exercise, Mistake, whole, word
from lib.mesh import Group
from lib.planner.rows import predict, read_rows

FACTORS: dict[str, Callable[[dict], float]] = {  # kind of time → the factor of its wrong formula, in a row
    "tp": lambda row: row["tp"] / 2,
    "attention": lambda row: 2 if row["flash"] else 1,
    "bubble": lambda row: row["interleave"],
    "dp": lambda row: row["microbatches"],
    "matmuls": lambda row: 3 / 4 if row["recompute"] == "full" else 1,
    "memory": lambda row: 2 / 5,
    "nothing": lambda row: 1,
}
SHOWN = ("id", "gpu", "gpus", "tp", "pp", "dp", "interleave", "microbatches", "recompute", "flash", "seq", "step_s")
ROWS, CLEAR = 36, 1.05
PUBLISHED = Path(lib.__file__).parents[1] / "book" / "published" / "runs.json"
LEFT_OUT = {"aa", "zb"}  # not calibrated, on a shared network; and without tp or dp


@lru_cache(maxsize=1)
def published() -> tuple[dict, ...]:
    rows = (row for row in read_rows(PUBLISHED) if row["stack"] not in LEFT_OUT)
    return tuple({name: row[name] for name in SHOWN} | {"seconds": predict(row).seconds._asdict()} for row in rows)


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Runs by which each wrong formula is clearly found, and none of the wrong methods finds all of them."""
    rng = random.Random(whole(generator, 0, 2**40))
    while True:
        rows, terms = rng.sample(published(), ROWS), rng.sample([*FACTORS], len(FACTORS))
        planners = [[planted(row, term) for row in rows] for term in terms]
        methods = [m.wrong for m in EXERCISE.mistakes]
        found = [terms, *([method(rows) for rows in planners] for method in methods)]
        differ = all(found[i] != found[j] for i in range(len(found)) for j in range(i))
        if differ and all(map(is_clear, planners, terms)):
            return [{"planners": planners, "terms": terms}]


def planted(row: dict, term: str) -> dict:
    """A row as a planner predicts it that has this term wrong."""
    seconds = {kind: s * (FACTORS[term](row) if kind == term else 1) for kind, s in row["seconds"].items()}
    return row | {"seconds": seconds}


def is_clear(rows: list[dict], term: str) -> bool:
    """By the median of the errors as well as by their mean."""
    for score in (mid, mean):
        scores = {kind: score(errors(rows, kind), rows) for kind in FACTORS}
        if min(scores[other] for other in FACTORS if other != term) < CLEAR * scores[term]:
            return False
    return True


def body(answer: Callable, group: Group, given: Data) -> Data:
    return {f"planner {i}": word(answer(rows)) for i, rows in enumerate(given["planners"], 1)}


def reference(given: list[Data]) -> list[Data]:
    return [{f"planner {i}": term for i, term in enumerate(given[0]["terms"], 1)}]


# ---- programs -------------------------------------------------------------------------------------------------------


def errors(rows, kind, undo=lambda factor: 1 / factor):
    """Relative, of each run, once this kind is corrected."""
    found = []
    for row in rows:
        seconds = row["seconds"]
        more = seconds.get(kind, 0) * (undo(FACTORS[kind](row)) - 1)
        found.append((sum(seconds.values()) + more) / row["step_s"] - 1)
    return found


def mid(errors, rows):
    return median(map(abs, errors))


def mean(errors, rows):
    return fmean(map(abs, errors))


def wrong_term(rows, score=mid, kinds=tuple(FACTORS), **how):
    """The kind whose correction helps most, by such a score."""
    return min(kinds, key=lambda kind: score(errors(rows, kind, **how), rows))


def by_capped_errors(rows):
    """A text of numpy's."""
    return np.str_(wrong_term(rows, lambda errors, rows: fmean(min(abs(e), 0.1) for e in errors)))


EXERCISE = Exercise(
    id="14.4",
    title="wrong_term",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(1,),
    right=(wrong_term, partial(wrong_term, score=mean), by_capped_errors),
    mistakes=(
        Mistake(
            "You name the kind that takes most of the time. It is the largest in every planner, right or wrong: find "
            "the correction that makes the errors smaller.",
            lambda rows: max(rows[0]["seconds"], key=lambda kind: sum(row["seconds"][kind] for row in rows)),
        ),
        Mistake(
            "You judge by the first run alone. A single run is explained by several corrections, and by chance: a "
            "wrong formula shows in all runs that have its property.",
            partial(wrong_term, score=lambda errors, rows: abs(errors[0])),
        ),
        Mistake(
            "You judge by the worst run. It is off for a reason that is in no formula here, so a wrong correction "
            "that hides it looks good. Take the median or the mean.",
            partial(wrong_term, score=lambda errors, rows: max(map(abs, errors))),
        ),
        Mistake(
            "You let errors of both signs cancel. A planner 20% too fast on half of the runs and 20% too slow on the "
            "other half is not right: take absolute values first.",
            partial(wrong_term, score=lambda errors, rows: abs(median(errors))),
        ),
        Mistake(
            "You add up seconds. Then the few runs with the longest steps dominate. Divide each difference by the "
            "measured seconds of its run.",
            partial(
                wrong_term,
                score=lambda errors, rows: sum(abs(e) * row["step_s"] for e, row in zip(errors, rows, strict=True)),
            ),
        ),
        Mistake(
            'You always find something. One of the planners is right: compare each correction with none, "nothing".',
            partial(wrong_term, kinds=tuple(FACTORS)[:-1]),
        ),
        Mistake(
            "You apply each wrong factor again. To undo it, divide the kind by it.",
            partial(wrong_term, undo=lambda factor: factor),
        ),
    ),
)
