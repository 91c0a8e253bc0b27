"""Every sentence of a task is checked, or is advice and says why; what breaks a demand was seen to fail by its fact."""

from collections import defaultdict

import pytest
import torch

from course.check.catalogue import EXERCISES
from course.check.compare import results_of_part, same
from course.check.exercise import Exercise, Mistake
from course.check.running import NoAnswer, in_ranks
from tests.course import demands
from tests.course.demands import Demand, Row
from tests.course.test_check import marks

CHAPTERS = sorted({exercise.chapter for exercise in EXERCISES.values()})
TABLES = {name: found for chapter in CHAPTERS for name, found in demands.read(chapter).items()}


def mistake_of(row: Row, exercise: Exercise) -> Mistake:
    """The mistake whose hint begins so. Several programs may have one hint: the first that is in the list."""
    found = {m.hint: m for m in reversed(exercise.mistakes) if m.hint.startswith(row.hint)}
    assert len(found) == 1, f"{exercise.id}: {len(found)} hints begin with {row.hint!r}"
    return next(iter(found.values()))


def test_a_text_is_taken_apart_into_sentences():
    text = (
        "## 1. Title\n\nSee [a page](x.md#a), e.g. one.\n\n**B.** `x` is *two*:\n\n- A point. It goes\n  on.\n- $m$ "
        "more, at most 3.\n\n```text\nrank 0\n```\n\nThe end."
    )
    said = ["See a page, e.g. one.", "`x` is *two*:", "A point.", "It goes on.", "$m$ more, at most 3."]
    assert demands.sentences(text) == [*said, "[block] rank 0", "The end."]
    assert [Demand(one).is_strict for one in said] == [False] * 4 + [True]
    assert not Demand("From the section Before the run.").is_strict


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_table_has_each_sentence_once_with_what_checks_it(chapter):
    assert demands.read(chapter) and demands.written(chapter) == (demands.TABLES / f"{chapter}.txt").read_text()
    asked = {name for name, exercise in EXERCISES.items() if exercise.chapter == chapter}
    assert asked == demands.read(chapter).keys()
    for name, found in demands.read(chapter).items():
        for one in found:
            assert bool(one.rows) != bool(one.advice), (name, one)
            assert not (one.advice and one.is_strict), f"{name}: it says must, only, before …: {one.sentence}"
            assert all(row.hint or row.fact == "lib.comm" for row in one.rows), (name, one)


@pytest.mark.parametrize(
    "exercise_id", [pytest.param(i, marks=marks(EXERCISES[i])) for i in sorted(EXERCISES) if i in TABLES]
)
def test_what_breaks_a_demand_fails_by_its_fact(exercise_id):
    exercise = EXERCISES[exercise_id]
    rows = {row: one.sentence for one in TABLES[exercise_id] for row in one.rows}
    if any(row.fact == "lib.comm" for row in rows):  # that it fails is tested once, in test_check.py
        assert hasattr(exercise.body, "__wrapped__"), "its body is not `raw`"
    broken = {row: mistake_of(row, exercise) for row in rows if row.hint}
    seen = wrong_results(exercise, [*dict.fromkeys(broken.values())])
    for row, mistake in broken.items():
        facts = {fact for fact in seen[mistake] if row.fact in fact}
        assert facts, f"{exercise_id}: {rows[row]!r} is not checked by {row.fact!r}: wrong are {seen[mistake]}"


def wrong_results(exercise: Exercise, mistakes: list[Mistake]) -> dict[Mistake, set[str]]:
    """The names of the results that are wrong with each mistake, for some number of ranks; `hangs` if it does."""
    found: dict[Mistake, set[str]] = defaultdict(set)
    for ranks in exercise.ranks:
        inputs = exercise.inputs(torch.Generator().manual_seed(3), ranks)
        right = (
            exercise.reference(inputs) if exercise.reference else in_ranks(exercise, exercise.right[:1], inputs)[0]
        )
        for several in ([m for m in mistakes if not m.hangs], *([m] for m in mistakes if m.hangs)):
            returned = in_ranks(exercise, [m.wrong for m in several], inputs) if several else []
            for mistake, got in zip(several, returned, strict=True):
                if isinstance(got, NoAnswer):
                    found[mistake].add("hangs" if got.stuck else got.hint)
                    continue
                for mine, others in zip(got, right, strict=True):
                    names = results_of_part(others)
                    wrong = (n for n in names if not same(mine, {n: others[n]}, exercise.tolerances))
                    found[mistake] |= set(wrong)
    return found
