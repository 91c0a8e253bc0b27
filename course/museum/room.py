"""A room: a real bug in at most forty lines, the numbers of its victims, and the check that would have caught it.

The problem: one reads of a bug, nods, and writes it half a year later. A check for it is harder: it must fire on the
sick program, and be silent while the program is healthy, in further layouts and with further data.
The idea: a room is a file of `course.exercises.ch15`, found by its name. It has a healthy `program`, and the sick one
is its text with a line changed (`SICK`); further ones have the same kind of fault in a different place (`WHERE`). A
visitor's check gets the results of all ranks, `RunSeen`. It must fire on each sick program in each layout of the room,
and be silent on healthy twins in three layouts, with three seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from inspect import getsource
from typing import Any, NamedTuple

import torch

from course.check.compare import ANYTHING, SEEN, Data, plain
from course.check.edits import Edited, exercise, read_mistakes
from course.check.exercise import Exercise, whole
from lib import trace
from lib.launch import HangError, run
from lib.mesh import Group, Mesh, MeshShape

FIRES, SILENT = "fires", "silent"
SEEDS = 3  # of healthy twins, in each layout
MOST_LINES = 40  # of a program
Job = tuple[int, Mapping[str, int], int]  # which program, axis → ranks, seed
NEVER_ALWAYS = """
lambda run: ""
    Your check is silent on the sick run.
        Look at what the victims had: which of these numbers would be different in a healthy run?
lambda run: "something is wrong"
    Your check fires on every run: after a day it will be switched off.
        It may fire only where a number is wrong. Ranks add in a different order than one process: allow for rounding,
        about 1e-12 of a number in float64. And of ranks that hold or read the same, only one counts.
"""
# Of an answer that is none of the mistakes before: right of the sick runs, or right of the healthy ones.
SOME = """
lambda run: {check}(run) or {anything!r}
    Your check finds the sick runs, and disturbs healthy ones.
        Look at the first of them below. Does the number depend on the layout, on the seed, or on the order in which
        ranks add? Compare only numbers that must be the same in all healthy runs.
lambda run: {check}(run) and {anything!r}
    Your check spares the healthy runs, and misses a sick one.
        In the run named below the fault is as real as in the others: what there is different from a healthy run?
lambda run: {anything!r}
    Your check disturbs healthy runs, and misses sick ones: what it looks at does not tell one from the other.
        A number that you read in the exhibit belongs to one layout and one seed. Compare numbers of one run: with each
        other, or with what the task says of them.
"""


class SentCall(NamedTuple):
    """A call of a rank: `all_reduce` along `dp`, and the bytes that it sends with an ideal ring."""

    kind: str
    axis: str
    bytes: float


@dataclass(frozen=True)
class RunSeen:
    """The results of a run: all that a check may look at.

    `run["loss"]` is the result of rank 0 with this name; `run.ranks[2]["loss"]` is that of rank 2.

    Args:
        layout: axis → ranks.
        seed: of weights and data.
        ranks: the results of each rank, by name; the `fields` of a room list the names.
        sent: the calls of each rank, in order.
        hang: the report, if the run hung.
        alone: the same program with the same seed in one process; None in a room whose model does not fit there.
    """

    layout: Mapping[str, int]
    seed: int
    ranks: Sequence[Data]
    sent: Sequence[Sequence[SentCall]] = ()
    hang: str = ""
    alone: RunSeen | None = None

    def __getitem__(self, name: str) -> Any:
        return self.ranks[0][name]


@dataclass(frozen=True)
class Room:
    """An incident, as its file tells it.

    Args:
        id: of its exercise, such as "15.4".
        symptom: the title, which does not name the cause.
        story: the events, in Markdown: the text of the file's docstring.
        source: the thread, in Markdown, with its date.
        guesses: kind of cause → the fact that speaks for or against it; the first is right.
        cause: the fault and its repair, in Markdown.
        fields: of a `RunSeen` in this room: name → meaning.
        layouts: three, each axis → ranks; a visitor sees the first.
        programs: the healthy one, `(mesh, seed) -> results of this rank`, and the sick one; perhaps further sick ones,
            with the same kind of cause.
        where: of each sick program but the first, where its fault is, such as "on one rank".
        demand: a sentence of the task: where a check must find the fault as well.
        exhibit: (sick run) → the numbers of the victims: rows of a table, the first its head, or a text.
        planned: whether the program's text has a function `planned(layout, seed) -> data of each rank at the start`.
            Then the sick program may hang, and a check needs no run of it.
        fits: whether one process can run it too; if not, `RunSeen.alone` is None.
    """

    id: str
    symptom: str
    story: str
    source: str
    guesses: Mapping[str, str]
    cause: str
    fields: Mapping[str, str]
    layouts: Sequence[Mapping[str, int]]
    programs: Sequence[Edited]
    exhibit: Callable[[RunSeen], str | Sequence[Sequence[object]]]
    where: Sequence[str]
    demand: str
    planned: bool = False
    fits: bool = True

    @property
    def changed(self) -> str:
        """The sick program, with the lines that are wrong and the lines that they should be marked by - and +."""
        healthy, sick = (one.text.splitlines() for one in self.programs[:2])
        return "\n".join(line.rstrip() for line in list(unified_diff(sick, healthy, n=MOST_LINES, lineterm=""))[3:])

    def victims(self, seed: int = 0) -> RunSeen:
        """The sick program in the first layout, for the exhibit: if it hangs, the run has the report."""
        layout, (known,) = self.layouts[0], self.runs([(1, self.layouts[0], seed)])
        if not self.planned:
            return known
        try:
            run(_on_rank, _size(layout), [(self.programs[1], layout, seed)])
        except HangError as error:
            return replace(known, hang=str(error))
        raise RuntimeError(f"{self.symptom}: the sick program does not hang")

    def runs(self, jobs: Sequence[Job]) -> list[RunSeen]:
        """A run for each job, with its twin of one process; a twin serves all layouts with the same axes."""
        made = self._runs(jobs)
        if not self.fits:
            return made
        wanted = [(which, tuple(layout), seed) for which, layout, seed in jobs]
        alone = [*dict.fromkeys(wanted)]
        found = self._runs([(which, dict.fromkeys(axes, 1), seed) for which, axes, seed in alone])
        twins = dict(zip(alone, found, strict=True))
        return [replace(ours, alone=twins[key]) for ours, key in zip(made, wanted, strict=True)]

    def _runs(self, jobs: Sequence[Job]) -> list[RunSeen]:
        """A run for each job. Ranks are started once for each number of ranks."""
        sizes = [_size(layout) for _, layout, _ in jobs]
        programs = [(self.programs[which], layout, seed) for which, layout, seed in jobs]
        known: dict[int, list[tuple[Data, list[SentCall]]]] = {}
        for size in sorted({*sizes}):
            here = [k for k, one in enumerate(sizes) if one == size]
            asked = [programs[k] for k in here]
            of_ranks = _planned(asked) if self.planned else run(_on_rank, size, asked)
            known |= zip(here, zip(*of_ranks, strict=True), strict=True)
        return [
            RunSeen(layout, seed, *map(list, zip(*known[k], strict=True))) for k, (_, layout, seed) in enumerate(jobs)
        ]


def room(
    names: Mapping[str, Any], check: Callable, *also_right: Callable, points: float = 2
) -> tuple[Room, Exercise]:
    """The room of a file, and its exercise: to write `check(run) -> a sentence, or "" while all is well`.

    Args:
        names: `globals()`: the fields of a `Room` in capitals, `program` and `exhibit`; `SICK`, the lines `old => new`
            that make the program sick, with `or` before another way; `MISTAKES` of `check`, as in `course.check.edits`.
            A program that takes a place or a size by `seed % 3` shows all three: seeds are three in a row.
        check: the model check, the solution; `also_right`: at least one further.
    """
    first, _, story = names["__doc__"].partition("\n\n")
    text = [names[name] for name in ("program", "planned") if name in names]
    healthy = Edited(names["__name__"], "".join(map(getsource, text)), "program")
    sick = [mistake.wrong for mistake in read_mistakes(f"{names['SICK'].strip()}\n    {first}", *text)]
    told = {name: names[name.upper()] for name in ("symptom", "source", "guesses", "cause", "fields", "layouts")}
    told |= {"where": names.get("WHERE", ()), "demand": names.get("DEMAND", "")}
    if len(told["where"]) != len(sick) - 1:
        raise ValueError(f"{len(sick) - 1} sick programs after the first, and {len(told['where'])} entries in WHERE")
    made = Room(
        first.partition(":")[0], story=story, programs=[healthy, *sick], exhibit=names["exhibit"],
        planned="planned" in names, fits=names.get("FITS", True), **told,
    )  # fmt: skip

    def inputs(generator: torch.Generator, n: int) -> list[Data]:
        first = whole(generator, 1, 10**6)
        seeds = range(first, first + SEEDS)
        jobs = [(0, layout, seed) for layout in made.layouts for seed in seeds]
        for which in range(1, len(made.programs)):  # in each layout, and with each seed
            jobs += [(which, layout, seeds[(k + which) % SEEDS]) for k, layout in enumerate(made.layouts)]
        return [{"runs": [(_name(made, job), seen) for job, seen in zip(jobs, made.runs(jobs), strict=True)]}]

    asked = names | {
        "inputs": inputs,
        "body": _body,
        "reference": lambda given: [{name: name.split()[0] for name, _ in given[0]["runs"]}],
        "MISTAKES": NEVER_ALWAYS + names.get("MISTAKES", "") + SOME.format(check=check.__name__, anything=ANYTHING),
    }
    judged = exercise(asked, points=points, right=(check, *also_right), ranks=(1,), timeout_s=10)
    # A factor before a distance that is compared with the rounding is no mistake: there are no slips to try.
    return made, replace(judged, solution=None)


def _body(check: Callable, group: Group, given: Data) -> Data:
    """What a check says of each run: whether it fires, and for the reader its first sentences."""
    said = [(name, check(seen)) for name, seen in given["runs"]]
    found: Data = {name: ANYTHING if words == ANYTHING else FIRES if words else SILENT for name, words in said}
    spoken = [f"{name.partition(' on the ')[2]}: {words}" for name, words in said if words]
    return found | {SEEN: "Your check says\n" + "\n".join(f"  {line}" for line in spoken)} if spoken else found


def _on_rank(
    world: Group, programs: Sequence[tuple[Edited, Mapping[str, int], int]]
) -> list[tuple[Data, list[SentCall]]]:
    """The results of this rank after each program, and its calls."""
    found = []
    for program, layout, seed in programs:
        mesh = Mesh(MeshShape(**layout), world)
        with trace.record(world.rank) as seen:
            known = program.load()(mesh, seed)
        sent = [SentCall(event.kind, event.axis, event.wire_bytes) for event in seen.events]
        found.append((plain(known), sent))
    return found


def _planned(programs: Sequence[tuple[Edited, Mapping[str, int], int]]) -> list[list[tuple[Data, list[SentCall]]]]:
    """The same for the data of each rank before its start."""
    plans = [replace(one, expression="planned").load()(layout, seed) for one, layout, seed in programs]
    return [[(known, []) for known in of_rank] for of_rank in zip(*plans, strict=True)]


def _name(room: Room, job: Job) -> str:
    """`fires on the sick run, on one rank: dp 2, tp 2, seed 7`: the expected verdict, and the run."""
    which, layout, seed = job
    where = ", ".join(f"{axis} {size}" for axis, size in layout.items())
    kind = "sick run" if which else "healthy run"
    differs = f", {room.where[which - 2]}" if which > 1 else ""
    return f"{FIRES if which else SILENT} on the {kind}{differs}: {where}, seed {seed}"


def _size(layout: Mapping[str, int]) -> int:
    return MeshShape(**layout).size
