"""14.4: the one wrong formula of a planner, found by its errors on published runs."""

import json
import random
from functools import cache
from pathlib import Path
from statistics import fmean, median

import numpy as np

import lib
from course.check.edits import exercise
from course.check.exercise import whole, word
from lib.planner import step_s
from lib.planner.training import training_of

FACTORS = {  # kind of time → the factor of its wrong formula, in a row
    "tp": lambda row: row["tp"] / 2,
    "attention": lambda row: 2 if row["flash"] else 1,
    "bubble": lambda row: row["interleave"],
    "dp": lambda row: row["microbatches"],
    "matmuls": lambda row: 3 / 4 if row["recompute"] == "full" else 1,
    "memory": lambda row: 2 / 5,
    "nothing": lambda row: 1,
}
SHOWN = ("id", "gpu", "gpus", "tp", "pp", "dp", "interleave", "microbatches", "recompute", "flash", "seq", "step_s")
ROWS, CLEAR, OFF = 28, 1.05, 0.02  # off by less: a right planner, at the median
RIGHT = [*FACTORS].index("nothing")
PUBLISHED = Path(lib.__file__).parents[1] / "book" / "published" / "runs.json"
LEFT_OUT = {"aa", "zb"}  # not calibrated, on a shared network; and without tp or dp


@cache
def published():
    rows = [row for row in json.loads(PUBLISHED.read_text(encoding="utf-8")) if row["stack"] not in LEFT_OUT]
    seconds = (step_s(*training_of(row))._asdict() for row in rows)
    return tuple({name: row[name] for name in SHOWN} | {"seconds": s} for row, s in zip(rows, seconds, strict=True))


def inputs(generator, n):
    """Runs by which each wrong formula is clearly found, and none of the wrong methods finds all of them."""
    rng = random.Random(whole(generator, 0, 2**40))
    methods = [m.wrong.load() for m in reversed(EXERCISE.mistakes)]  # the last ones are right most often
    runs, found = errors_of_all()
    *others, worst = sorted(range(len(runs)), key=found[RIGHT, RIGHT].__getitem__)
    while True:
        chosen, terms = [worst, *rng.sample(others, ROWS - 1)], rng.sample([*FACTORS], len(FACTORS))
        rng.shuffle(chosen)
        if not is_clear(found[:, :, chosen]):
            continue
        planners = [[planted(runs[i], term) for i in chosen] for term in terms]
        if differ(terms, ([*map(one, planners)] for one in methods)):
            return [{"planners": planners, "terms": terms}]


def differ(right, others):
    """Whether no two of them are equal; the rest is not computed after the first two that are."""
    found = [right]
    for one in others:
        if one in found:
            return False
        found.append(one)
    return True


def planted(row, term):
    """A row as a planner predicts it that has this term wrong."""
    seconds = {kind: s * (FACTORS[term](row) if kind == term else 1) for kind, s in row["seconds"].items()}
    return row | {"seconds": seconds}


@cache
def errors_of_all():
    """The published runs, and an array [wrong term, corrected kind, run] of their relative errors."""
    runs = published()
    return runs, np.array([[errors([planted(run, t) for run in runs], kind) for kind in FACTORS] for t in FACTORS])


def is_clear(found):
    """By the median of the errors, their mean, and their squares; and only the right planner is near at the median."""
    near = np.median(found[:, RIGHT], -1) < OFF
    if [*near.nonzero()[0]] != [RIGHT]:
        return False
    other = ~np.eye(len(FACTORS), dtype=bool)
    scores = np.median(found, -1), found.mean(-1), (found**2).mean(-1)
    return all((score >= CLEAR * score.diagonal()[:, None])[other].all() for score in scores)


def errors(rows, kind):
    """Relative, of each run, once this kind is corrected."""
    more = (row["seconds"].get(kind, 0) * (1 / FACTORS[kind](row) - 1) for row in rows)
    return [abs((sum(row["seconds"].values()) + x) / row["step_s"] - 1) for x, row in zip(more, rows)]


def body(answer, group, given):
    return {f"planner {i}": word(answer(rows)) for i, rows in enumerate(given["planners"], 1)}


def reference(given):
    return [{f"planner {i}": term for i, term in enumerate(given[0]["terms"], 1)}]


def wrong_term(rows):
    factors = {
        "tp": lambda row: row["tp"] / 2,
        "attention": lambda row: 2 if row["flash"] else 1,
        "bubble": lambda row: row["interleave"],
        "dp": lambda row: row["microbatches"],
        "matmuls": lambda row: 3 / 4 if row["recompute"] == "full" else 1,
        "memory": lambda row: 2 / 5,
        "nothing": lambda row: 1,
    }

    def error(row, kind):
        total = sum(row["seconds"].values())
        wrong = row["seconds"].get(kind, 0)
        corrected = total - wrong + wrong / factors[kind](row)
        return abs(corrected / row["step_s"] - 1)

    return min(factors, key=lambda kind: median(error(row, kind) for row in rows))


def by_mean(rows):
    return min(FACTORS, key=lambda kind: fmean(errors(rows, kind)))


def by_capped_errors(rows):
    """A text of numpy's."""
    return np.str_(min(FACTORS, key=lambda kind: fmean(min(e, 0.1) for e in errors(rows, kind))))


ALSO_RIGHT = """
median(error(row, kind) for row in rows) => sum(error(row, kind) ** 2 for row in rows)
    By their squares.
lambda rows: "nothing" if median(errors(rows, "nothing")) < OFF else wrong_term(rows)
    First whether anything is wrong.
"""

MISTAKES = """
median(error(row, kind) for row in rows) => -sum(row["seconds"].get(kind, 0) for row in rows)
    You name the kind that takes most of the time, in any planner.
        Find the correction that makes the errors smaller.
=> error(rows[0], kind)
    You judge by the first run alone, which several corrections explain.
        A wrong formula shows in all runs concerned.
=> min(error(row, kind) for row in rows)
    You judge by the best run. With many runs, some correction meets one of them by chance.
        Take the median or the mean.
=> median(error(row, kind) for row in [row for row in rows if factors[kind](row) != 1] or rows)
    You judge each correction by the runs that it changes, so each by different runs; and some runs are met better
    than others by any planner.
        Judge all of them, and "nothing", by the same runs.
=> max(error(row, kind) for row in rows)
    You judge by the worst run, which is off for a reason in no formula here.
        Take the median or the mean.
=> abs(median(error(row, kind) for row in rows))
abs(corrected / row["step_s"] - 1) => corrected / row["step_s"] - 1
    You let errors of both signs cancel.
        20% too fast on half of the runs and too slow on the rest is not right.
=> abs(corrected - row["step_s"])
median(error(row, kind) for row in rows) => sum(error(row, kind) for row in rows)
    You add up seconds, so few long steps dominate.
        Divide each difference by the measured seconds of its run.
"nothing": lambda row: 1, =>
    You always find something. One of the planners is right.
        Compare each correction with none, "nothing".
wrong / factors[kind](row) => wrong * factors[kind](row)
    You apply each wrong factor again.
        To undo it, divide the kind by it.
"""

EQUIVALENT = """
"tp": lambda row: row["tp"] / 2, => "tp": lambda row: (2 * (row["tp"] / 2)),
or "tp": lambda row: row["tp"] / 2, => "tp": lambda row: (100 * (row["tp"] / 2)),
or "tp": lambda row: row["tp"] / 2, => "tp": lambda row: row["tp"] / 1,
or "memory": lambda row: 2 / 5, => "memory": lambda row: (2 * (2 / 5)),
or "memory": lambda row: 2 / 5, => "memory": lambda row: (100 * (2 / 5)),
or "memory": lambda row: 2 / 5, => "memory": lambda row: 2 / 4,
or "matmuls": lambda row: 3 / 4 if => "matmuls": lambda row: (2 * (3 / 4)) if
or "matmuls": lambda row: 3 / 4 if => "matmuls": lambda row: (100 * (3 / 4)) if
or "matmuls": lambda row: 3 / 4 if => "matmuls": lambda row: 2 / 4 if
or "matmuls": lambda row: 3 / 4 if => "matmuls": lambda row: 3 / 3 if
    The answer is a word: a correction of another size may still be the one that makes the errors smallest.
abs(corrected / row["step_s"] - 1) => (2 * (abs(corrected / row["step_s"] - 1)))
or abs(corrected / row["step_s"] - 1) => (100 * (abs(corrected / row["step_s"] - 1)))
or abs(corrected / row["step_s"] - 1) => abs((2 * (corrected / row["step_s"] - 1)))
or abs(corrected / row["step_s"] - 1) => abs((100 * (corrected / row["step_s"] - 1)))
    The smallest of several is the same when all are multiplied.
for row in rows)) => for row in [*(rows)][1:]))
or for row in rows)) => for row in [*(rows)][:-1]))
or lambda rows: wrong_term(rows[1:])
or lambda rows: wrong_term(rows[:-1])
    A median over 28 runs does not depend on one of them.
"""

EXERCISE = exercise(globals(), points=3, right=(wrong_term, by_mean, by_capped_errors), ranks=(1,))
