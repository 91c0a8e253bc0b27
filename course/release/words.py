"""The texts of a homework: README and rubric."""

from __future__ import annotations

from collections.abc import Iterable

from course.check.exercise import COPIED
from course.check.judge import cases_of, dealt
from course.grade.assignment import Assignment, hidden_ranks
from course.release.effort import EXPLAINED, efforts

BEGIN = """## Begin

You need Python 3.11 or newer on Linux, macOS or WSL. Two cores are enough.

```
python3 -m venv .venv
.venv/bin/pip install torch -c requirements.txt --index-url https://download.pytorch.org/whl/cpu
.venv/bin/pip install -r requirements.txt
.venv/bin/jupyter lab
```

In Colab, upload a notebook and the zip, and run this in the first cell:

```
!unzip -q {id}-*.zip && mv {id} parallel-by-hand
```

Your work is in

"""
CHECK = """## Check yourself

The cell below each task prints PASS, TODO, or FAIL with what is wrong; `hint()`, or the same mistake again, says what
to do about it. Run it as often as you like. In a terminal, for all tasks of a file, or with a number behind it for
one:

```
{commands}
```
"""
SIZES = (
    "Where one process calls your function with several sizes, each that is right has its part of the points of the "
    "case; an answer that returns the same for all of them has none."
)
HAND_IN = """## Hand in

Hand in the notebooks, and do not rename them. The grader does not run them: it reads imports, functions, classes and
constants from the file, and calls your functions with new inputs. A function that needs more, such as a list that a
cell fills in a loop, is not complete. Printed and stored output does not count.
"""
_COLUMNS = ["task", "points", "minutes", "needs", "the mistake that it is after"]


def readme(assignment: Assignment, notebooks: Iterable[str]) -> str:
    """For students: tasks, due date, points, and how to check an answer."""
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
        CHECK.format(commands="\n".join(f".venv/bin/python -m course.check exercises/{name}" for name in names)),
        HAND_IN,
    ]
    return "\n".join(part for part in parts if part)


def rubric(assignment: Assignment, for_teacher: bool = False) -> str:
    """What each task asks and its points; for a teacher also the mistakes that have a hint, and model answers."""
    text = [f"# How points are given\n\n{assignment.title}. {SIZES}\n\n{EXPLAINED}\n"]
    for exercise in assignment.exercises:
        points = assignment.points[exercise.id]
        text.append(f"## {exercise.id} `{exercise.title}`, {points:g} points\n")
        text += [f"{effort.said}\n"] if (effort := efforts().get(exercise.id)) else []
        cases, hidden = cases_of(exercise), set() if for_teacher else hidden_ranks(exercise)
        each = [*zip(cases, dealt(points, len(cases)), strict=True)]
        text += [f"- {name}: {most:g}" for (ranks, name), most in each if ranks not in hidden]
        of_hidden = sum(most for (ranks, _), most in each if ranks in hidden)
        text += [f"- hidden cases: {of_hidden:.6g}"] * bool(of_hidden)
        asked = exercise.variants if exercise.id in assignment.varied else (exercise,)
        hints = [" ".join(mistake.words.split()) for one in asked for mistake in one.mistakes]
        hints = [hint for hint in dict.fromkeys(hints) if not hint.startswith(COPIED)]
        text += [f"\nRow {one.row}: {one.task}" for one in asked if one.task]
        if for_teacher:
            text += ["", "A wrong answer gets no points for a case, and one of these hints if it fits:\n"]
            text += [f"- {hint}" for hint in hints]
        else:
            text += ["", f"{len(hints)} mistakes have a hint."]
        text.append("")
    for name, asked in assignment.by_hand.items():
        text += [f"## {name}, {asked.points:g} points, graded by a person\n", asked.in_handout, ""]
        for row, answer in asked.answers.items() if for_teacher else ():
            text += [f"A model answer{f' for row {row}' if row else ''}:\n\n{answer}", ""]
    return "\n".join(text)


def _points(assignment: Assignment) -> str:
    known, rows, minutes = efforts(), [], 0
    for e in assignment.exercises:
        rows.append([f"{e.id} `{e.title}`", f"{assignment.points[e.id]:g}", "", "", ""])
        if effort := known.get(e.id):
            rows[-1][2:] = f"{effort.minutes}", effort.needs, effort.after
            minutes += effort.minutes
    rows += [[f"{name}, in words", f"{asked.points:g}", "", "", ""] for name, asked in assignment.by_hand.items()]
    rows.append(["together", f"{assignment.max_score + assignment.points_by_hand:g}", f"{minutes}", "", ""])
    table = "\n".join(f"| {' | '.join(row)} |" for row in [_COLUMNS, ["---"] * len(_COLUMNS), *rows])
    more = (
        "The hours above also count the chapters, what goes wrong, and questions in words."
        if assignment.hours
        else ""
    )
    return f"## Points\n\n{table}\n\n{EXPLAINED} {more}\n\n`rubric.md` has the details.\n"


def _late(assignment: Assignment) -> str:
    late = assignment.late
    if not assignment.due:
        return ""
    if not late.max_days:
        return "No late day is allowed: after the due date nothing counts.\n"
    return (
        f"Each started day after the due date costs {late.percent_per_day:g} % of the points; after {late.max_days} "
        "days nothing counts.\n"
    )
