"""Writes what is generated from the rooms of the museum, or checks that it agrees with them.

    python tools/museum.py            # what `make notebooks` runs first
    python tools/museum.py --check    # changes nothing; fails naming what is out of step

A room is one file of course/exercises/ch15/. From it come its section of chapters/15b_museum.md, and its task in
solutions/15_when_it_goes_wrong.md; in both, what lies between the two marks is generated, and nothing else.
"""

import inspect
import re
from pathlib import Path

from notebooks import settle, twins
from set_repository import ROOT

from book.figures.museum import rooms
from course.check.catalogue import EXERCISES
from course.museum.room import Room

BEGIN, END = "<!-- rooms: written by tools/museum.py -->", "<!-- end of the rooms -->"
PAGE, TASKS = ROOT / "chapters" / "15b_museum.md", ROOT / "solutions" / "15_when_it_goes_wrong.md"
QUESTION = "What kind of cause?"
SHOWN = (
    "What does each of your checks say of the sick run of every room? This is shown and not judged. A false alarm: the "
    "check fires on the healthy run of this room as well. A dash: the run does not have the numbers that it looks at."
)
SAYS = "What is wrong with this run; an empty text if all is well."  # what a check returns


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def heading(room: Room) -> str:
    """Of its task."""
    return f"{room.id.partition('.')[2]}. {room.symptom}"


def section(room: Room) -> str:
    """On the page: what happened, what the victims had, a guess, and behind folds the cause."""
    (right, why), *others = room.guesses.items()
    options = [(right, f"Right: {why}"), *((kind, f"Wrong: {why}") for kind, why in others)]
    options = sorted(options)  # so that the right one stands anywhere
    guesses = "\n".join(
        f'> <details class="option"><summary>{kind}</summary>{why}</details>' for kind, why in options
    )
    cause = joined(room.cause).replace("(../chapters/", "(")  # a link of the solutions, which have it as well
    task = f"../exercises/{TASKS.stem}.ipynb#{anchor(heading(room))}"
    return f"""## {room.symptom}

**Room {room.id}.** {joined(room.story)} {room.source}.

```{{code-cell}} ipython3
:tags: [figure]

exhibit_drawn("{room.id}")
```

> **Guess before you read on.** {QUESTION}
{guesses}

<details class="cause"><summary>Cause and program</summary>

{cause}

```diff
{room.changed}
```

</details>

[Write the check]({task}).
"""


def task(room: Room) -> str:
    """In the exercises: what a check gets; the solution is the text of the model check."""
    solution, points = EXERCISES[room.id].right[0], EXERCISES[room.id].points
    head, _, body = inspect.getsource(solution).partition("\n")
    fields = "\n".join(f'- `run["{field}"]`: {meaning}' for field, meaning in room.fields.items())
    where = f"[{room.symptom}](../chapters/{PAGE.stem}.ipynb#{anchor(room.symptom)})"
    alone = "" if room.fits else " There is no `run.alone`: no run in one process."
    demand = f" {room.demand}" if room.demand else ""
    name = solution.__name__
    cell = name.replace("_", "-")
    to_write = nbgrader(cell, "solution: true", "grade: false", "locked: false")
    to_check = nbgrader(f"check-{cell}", "solution: false", "grade: true", "locked: true", f"points: {points:g}")
    return f"""## {heading(room)}

From the room {where} of the museum. Write the check that would have caught it.{alone}{demand}

{fields}

```{{code-cell}} ipython3
exhibit("{room.id}")
```

{code(to_write)}
{head}
    \"\"\"{SAYS}\"\"\"
    ### BEGIN SOLUTION
{body.rstrip()}
    ### END SOLUTION
```

{code(to_check, "tags: [check]")}
check("{room.id}", {name})
```

+++ {{"tags": ["solution-only"]}}

{joined(room.cause)}

+++
"""


def nbgrader(cell: str, *marks: str) -> str:
    """The marks of a cell, as jupytext writes them."""
    marks = sorted([*marks, f"grade_id: {cell}", "schema_version: 3", "task: false"])
    return "\n".join(["nbgrader:", *(f"  {mark}" for mark in marks)])


def code(*metadata: str) -> str:
    """The beginning of a cell with metadata."""
    return "\n".join(["```{code-cell} ipython3", "---", *metadata, "---"])


def joined(text: str) -> str:
    """Paragraphs, each in one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def last() -> str:
    """Below the tasks: all checks in all rooms."""
    names = "".join(f"    {EXERCISES[id].right[0].__name__},\n" for id in rooms())
    return f"""## Each check in all rooms

{SHOWN}

```{{code-cell}} ipython3
elsewhere(
{names})
```
"""


def with_rooms(path: Path, generated: str) -> str:
    """The text of a file, with this between its marks.

    Raises:
        ValueError: it does not have both marks.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path.name} must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{generated}\n{end}{after}"


if __name__ == "__main__":
    made = {PAGE: [*map(section, rooms().values())], TASKS: ["+++\n", *map(task, rooms().values()), last()]}
    wanted = {path: with_rooms(path, "\n".join(parts)) for path, parts in made.items()}
    wanted[TASKS] = twins(TASKS, wanted[TASKS])[TASKS]  # with the line above each task
    settle(wanted, [], __doc__, "a room has changed; run make notebooks")
