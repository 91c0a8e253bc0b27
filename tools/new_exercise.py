"""Begins an exercise: its file, which runs as it is, and the cells of its task.

make exercise ID=03.9 NAME=scaled_sum     # course/exercises/ch03/e03_9_scaled_sum.py
make exercise ID=03.9                     # course/exercises/ch03/e03_9_answer.py
"""

import argparse
import itertools
import re
import sys

from set_repository import ROOT

FILE = '''"""{id}: a sentence that says what the learner writes."""

from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random
from lib import comm


def inputs(generator, n):
    """What each of n ranks gets: other numbers at each call."""
    return [{{"x": random(generator, 3)}} for _ in range(n)]


def body(answer, group, given):
    """What a rank does with an answer. What it returns is judged: tensors, numbers and words."""
    return {{"result": answer(given["x"].clone(), group)}}


def reference(given):
    """What each rank must return, computed by one process."""
    total = sum(rank["x"] for rank in given)
    return [{{"result": total}} for _ in given]


def {name}(x, group):
    return comm.all_reduce(x, group)


def by_torch_distributed(x, group):
    dist.all_reduce(x)
    return x


MISTAKES = """
comm.all_reduce(x, group) => x
    Each rank has its own x: nothing is sent.
        Sum over the ranks.
comm.all_reduce(x, group) => comm.all_reduce(x, group, op="mean")
    You return the mean of the ranks.
        Sum, and do not divide.
comm.all_reduce(x, group) => comm.all_reduce(comm.all_reduce(x, group), group)
    Each result is as many times too large as there are ranks.
        You sum twice: once is enough.
"""

EXERCISE = exercise(globals(), points=2, right=({name}, by_torch_distributed))
'''

TASK = '''## {number}. A title that a search can find

From the section [its heading](../chapters/{page}.ipynb#its-anchor). What to write, and why.

- `x`: shape and meaning.
- Return what, on which ranks.

```{{code-cell}} ipython3
---
nbgrader: {{grade: false, grade_id: {cell}, locked: false, schema_version: 3, solution: true, task: false}}
---
def {name}(x, group):
    """What it returns."""
    ### BEGIN SOLUTION
    return comm.all_reduce(x, group)
    ### END SOLUTION
```

```{{code-cell}} ipython3
---
nbgrader:
  {{grade: true, grade_id: check-{cell}, locked: true, points: 2, schema_version: 3, solution: false, task: false}}
tags: [check]
---
check("{id}", {name})
```

+++ {{"tags": ["solution-only"]}}

Why the answer is right, and what its mistakes cost.

+++
'''


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Begin an exercise.")
    parser.add_argument("id", help="chapter and number, such as 03.9")
    parser.add_argument(
        "name", nargs="?", default="answer", help="of the function that the learner writes, such as scaled_sum"
    )
    args = parser.parse_args(arguments)
    if not re.fullmatch(r"\d\d\.[1-9]\d?", args.id):
        sys.exit(f"ID={args.id} is no exercise: two digits of the chapter, a dot and a number, such as 03.9")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", args.name):
        sys.exit(
            f"NAME={args.name} cannot be a file's and a function's: lower case, digits and _, such as scaled_sum"
        )
    chapter, _, number = args.id.partition(".")
    pages = [path.stem for path in (ROOT / "solutions").glob(f"{chapter}_*.md")]
    if not pages:
        sys.exit(f"there is no solutions/{chapter}_*.md for the exercise {args.id}")
    folder = ROOT / "course" / "exercises" / f"ch{chapter}"
    if there := [path.relative_to(ROOT) for path in folder.glob(f"e{chapter}_{number}_*.py")]:
        free = next(k for k in itertools.count(1) if not [*folder.glob(f"e{chapter}_{k}_*.py")])
        sys.exit(f"exercise {args.id} exists: {there[0]}; {chapter}.{free} is free")
    names = {
        "id": args.id,
        "name": args.name,
        "number": number,
        "page": pages[0],
        "cell": args.name.replace("_", "-"),
    }
    path = folder / f"e{chapter}_{number}_{args.name}.py"
    folder.mkdir(exist_ok=True)
    path.write_text(FILE.format(**names), encoding="utf-8")
    print(f"{path.relative_to(ROOT)} is an exercise that runs: make it yours.")
    print(f"Its task, for solutions/{pages[0]}.md, in front of its last heading:\n")
    print(TASK.format(**names))
    print(
        "Its line in course/exercises/after.toml: what mistake it is after, and a part of the hint that names it:\n"
    )
    print(f'"{args.id}" = ["a few words", "a part of a hint"]')


if __name__ == "__main__":
    main()
