"""What a homework says of itself: README and rubric."""

from __future__ import annotations

from collections.abc import Iterable

from lib.check.judge import cases_of
from lib.grade.assignment import Assignment, hidden_ranks

BEGIN = """## Begin

You need Python 3.11 or newer on Linux, macOS or WSL. Two cores are enough.

```
python3 -m venv .venv
.venv/bin/pip install -r requirements.txt
.venv/bin/jupyter lab
```

In Colab, upload a notebook and the zip, and run this in a cell above all others:

```
!unzip -q {id}-handout.zip && mv {id} parallel-by-hand
```

Your work is in

"""
CHECK = """## Check yourself

The cell below each task says PASS, TODO, or FAIL with the mistake that it recognised. Run it as often as you like. In
a terminal, for all tasks of a file:

```
{commands}
```
"""
HAND_IN = """## Hand in

Hand in the notebooks, with the names that they have. They are graded without being run: imports, functions, classes and
constants are taken out of the file, and your functions are called with other numbers. A function that needs more, such
as a list that another cell fills in a loop, is not complete. What a cell prints, and the output that is stored, do not
count.
"""


def readme(assignment: Assignment, notebooks: Iterable[str]) -> str:
    """For students: what to do, until when, for how many points, and how to check oneself."""
    names = list(notebooks)
    facts = [f"{assignment.max_score + assignment.points_by_hand:g} points"]
    facts += [f"about {assignment.hours:g} hours"] if assignment.hours else []
    facts += [f"due {assignment.due:%A, %d %B %Y, %H:%M} ({assignment.due:%z})"] if assignment.due else []
    goals = "".join(f"- {goal}\n" for goal in assignment.goals)
    parts = [
        f"# {assignment.title}\n\n{', '.join(facts)}.\n",
        assignment.text and f"{assignment.text}\n",
        goals and f"Afterwards you can:\n\n{goals}",
        _points(assignment),
        _late(assignment),
        BEGIN.format(id=assignment.id) + "".join(f"- `exercises/{name}`\n" for name in names),
        CHECK.format(commands="\n".join(f".venv/bin/python -m lib.check exercises/{name}" for name in names)),
        HAND_IN,
    ]
    return "\n".join(part for part in parts if part)


def rubric(assignment: Assignment, for_teacher: bool = False) -> str:
    """How points are given; for a teacher also the mistakes that are recognised, and model answers."""
    text = [f"# How points are given\n\n{assignment.title}.\n"]
    for exercise in assignment.exercises:
        points = assignment.points[exercise.id]
        text.append(f"## {exercise.id} `{exercise.title}`, {points:g} points\n")
        cases, hidden = cases_of(exercise), set() if for_teacher else hidden_ranks(exercise)
        each = points / len(cases)
        text += [f"- {name}: {each:g}" for ranks, name in cases if ranks not in hidden]
        unseen = sum(ranks in hidden for ranks, _ in cases)
        text += [f"- cases that you do not see: {unseen * each:g}"] * bool(unseen)
        hints = list(dict.fromkeys(" ".join(mistake.hint.split()) for mistake in exercise.mistakes))
        if for_teacher:
            text += ["", "A wrong answer gets no points for a case, and one of these hints where it fits:\n"]
            text += [f"- {hint}" for hint in hints]
        else:
            text += ["", f"{len(hints)} mistakes are recognised and explained."]
        text.append("")
    for name, asked in assignment.by_hand.items():
        text += [f"## {name}, {asked.points:g} points, graded by a person\n", asked.in_handout, ""]
        for row, answer in asked.answers.items() if for_teacher else ():
            text += [f"A model answer{f' for row {row}' if row else ''}:\n\n{answer}", ""]
    return "\n".join(text)


def _points(assignment: Assignment) -> str:
    rows = [f"| {e.id} `{e.title}` | {assignment.points[e.id]:g} |" for e in assignment.exercises]
    rows += [f"| {name}, in words | {asked.points:g} |" for name, asked in assignment.by_hand.items()]
    total = assignment.max_score + assignment.points_by_hand
    rows += [f"| together | {total:g} |"]
    return "## Points\n\n| task | points |\n|---|---|\n" + "\n".join(rows) + "\n\n`rubric.md` has the details.\n"


def _late(assignment: Assignment) -> str:
    late = assignment.late
    if not assignment.due or not late.max_days:
        return ""
    return (
        f"Each begun day after that costs {late.percent_per_day:g} % of the points; after {late.max_days} days there "
        "are none.\n"
    )
