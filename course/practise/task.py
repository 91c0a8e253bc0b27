"""An exercise whose answer is what is wrong with a sick run: a dict from each cause to its place.

What is right follows from the seed, so the file of the exercise does not say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from course.check.compare import Data
from course.check.exercise import ROWS, Exercise, Mistake, with_variants
from course.practise.answers import RERUN
from course.practise.causes import CAUSES, COSTS, NUMBERS, place_text
from course.practise.draws import EXERCISES, Case, drawn_case

NOTHING, SEVERAL, NO_PLACE, NO_DICT = "none", "several", "no such place", "no dict"
WHAT = ("cause", "form", "place", "others")  # of each group: the cause, whether it can be at its place, and no causes


def diagnosis(number: str, title: str, rows: int, points: float = 2) -> Exercise:
    """The exercise with this number, and so many variants, each with a different run."""
    return with_variants(*(_row(number, title, points, row) for row in ("", *ROWS[:rows])))


def _row(number: str, title: str, points: float, row: str) -> Exercise:
    case, groups = drawn_case(number + row), EXERCISES[number]
    right = dict(case.sickness)
    # All that a rank is given, because an answer could read it there.
    possible = {of: {name: _places(case, name) for name in _in_group(of)} for of in (NUMBERS, COSTS)}

    def body(answer: Callable, group: Any, given: Data) -> Data:
        result = answer()
        if not isinstance(result, dict):
            return {f"{what} in {of}": NO_DICT for of in possible for what in WHAT}
        named = [(str(name).strip().lower(), place_text(place)) for name, place in result.items()]
        unknown = [name for name, _ in named if not any(name in causes for causes in possible.values())]
        found = {}
        for of, causes in possible.items():
            mine = [entry for entry in named if entry[0] in causes]
            cause, place = mine[0] if len(mine) == 1 else (SEVERAL if mine else NOTHING, NOTHING)
            form = "a place" if place in causes.get(cause, ()) else NO_PLACE
            entries = cause, form, place, SEVERAL if unknown else NOTHING
            found |= {f"{what} in {of}": entry for what, entry in zip(WHAT, entries, strict=True)}
        return found

    return Exercise(
        id=number,
        title=title,
        points=points,
        body=body,
        inputs=lambda generator, n: [{}],
        ranks=(1,),
        right=(lambda: right, lambda: {name.upper(): place.replace(" ", "=") for name, place in right.items()}),
        mistakes=tuple(_mistakes(case, groups)),
        parts=groups if len(groups) > 1 else ("",),
        task=f'Your run is `sick_run("{number}", row="{row}")`, with a different cause in a different place.',
    )


def _in_group(of: str) -> list[str]:
    return [cause.name for cause in CAUSES.values() if cause.group == of]


def _places(case: Case, cause: str) -> list[str]:
    return CAUSES[cause].places(case.config.layout, case.config.model.dropout)


def _mistakes(case: Case, groups: tuple[str, ...]) -> Iterator[Mistake]:
    """A wrong form; then of each group a wrong cause, two or none, and a wrong place of the right cause."""
    form = "The keys are names of the catalogue, and each value is a place, such as {'slow-rank': 'rank 0'}."
    yield Mistake("Your function does not return a dict.", lambda: None, ("cause",), repair=form)
    unknown = "Your dict has a key that is not the name of a cause."
    yield Mistake(unknown, lambda: {"?": NO_PLACE}, ("others",), repair=form)
    for of in (NUMBERS, COSTS):
        true = dict(zip(groups, case.sickness, strict=True)).get(of)
        rest = {name: place for name, place in case.sickness if CAUSES[name].group != of}
        look = f"Look at {CAUSES[true[0]].look}." if true else "Read the task: this run has another kind of cause."

        def wrong(hint: str, repair: str, what: str, answer: object, of: str = of) -> Mistake:
            return Mistake(hint, lambda: answer, (f"{what} in {of}",), repair=repair)

        others = [name for name in _in_group(of) if not (true and name == true[0])]
        for name in others:
            hint = f"{name} would show {CAUSES[name].shows}. This run does not."
            yield wrong(hint, look, "cause", rest | {name: NO_PLACE})
        two = dict.fromkeys(others[:2], NO_PLACE)
        yield wrong(f"You name several causes for {of}.", look, "cause", rest | two)
        if true:
            name, where = true
            yield wrong(f"You name no cause for {of}.", look, "cause", rest)
            how = f"Its place is {CAUSES[name].where}. {RERUN}"
            yield wrong(f"{name} is right, and it cannot be where you say.", how, "form", rest | {name: NO_PLACE})
            for place in _places(case, name):
                if place != where:
                    hint = f"{name} is right, and {place} is not its place."
                    yield wrong(hint, how, "place", rest | {name: place})
