"""What one looks at first: losses and norms, who differs, what was sent, who waits for whom.

The same as data and as a text of at most 40 lines: `RunReport` is beside one process, `OwnReport` is of the run alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from course.practise.causes import KINDS
from course.practise.draws import options_text
from course.practise.instruments import Seen, Waited
from lib.layout import AXES, Layout
from lib.planner.plan_messages import step_traffic
from lib.planner.report import table, wrapped
from lib.train import planned
from lib.training.config import TrainConfig

WARMUP = 1  # steps whose times are left out
WIDTH = 78  # of a line, on a page of the book
SAME = 1e-3  # distances below this are rounding, in float32


@dataclass(frozen=True)
class OwnReport:
    """A run beside its plan; `dataclasses.asdict` makes plain data of it.

    Attributes:
        run: its options.
        losses, norms: of each step, on rank 0. `norms` are those that clip.
        held_norm: the norm of the gradients of step 1 as the ranks hold them, computed from all shards.
        own_norms: rank -> `weights` before step 1, `gradient` and `update` of step 1, and the gradient of each kind of
            parameter: norms of what this rank owns. It has no kind of which it owns nothing.
        copies: axis -> `gradient` of step 1 and `weights` at the end: the largest distance between copies of a tensor,
            as a fraction; None where no rank holds a copy.
        samples: a coordinate on dp -> a checksum of each sequence of step 1.
        sent: "kind axis" -> `calls` and `bytes` of a rank in a step, `planned_calls` and `planned_bytes`, and the
            `rank`: of all ranks the one that is farthest from its plan.
        sums: rank -> how many sums of gradients it waited for before its optimizer, and how many in all.
        busy_s: rank -> seconds of a step in which it does not wait. This and the next two have the least of all steps:
            a cause is there in each of them, and a disturbance by other programs is not.
        waits_s: rank -> axis -> (waiting for a rank that comes later, waiting on the link), seconds of a step.
        waited_for_s: rank -> seconds of a step, added up, in which the others waited for it.
        links_s: axis -> (measured alone, planned) seconds of a message of 64 kB.
    """

    run: str
    losses: list[float]
    norms: list[float]
    held_norm: float
    own_norms: dict[str, dict[str, float]]
    copies: dict[str, dict[str, float | None]]
    samples: dict[str, list[str]]
    sent: dict[str, dict[str, float]]
    sums: dict[str, tuple[int, int]]
    busy_s: dict[str, float]
    waits_s: dict[str, dict[str, tuple[float, float]]]
    waited_for_s: dict[str, float]
    links_s: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        lines = [f"run: {self.run}", self._steps(), *self._compared(), *self._sent(), *self._times()]
        return wrapped(lines, WIDTH)

    def _steps(self) -> str:
        return _by_step([("loss", self.losses), ("norm that clips", self.norms)])

    def _compared(self) -> list[str]:
        tables = []
        for head, columns in (
            ("norms of step 1", ("weights", "gradient", "update")),
            ("gradient of step 1, by kind", KINDS),
        ):
            rows = [[head, *columns]]
            for name, of in self.own_norms.items():
                rows.append([name, *(f"{of[what]:.4f}" if what in of else "" for what in columns)])
            tables.append(table(rows))
        return [self._held(), *tables, *self._copied(), *_read(self.samples)]

    def _held(self) -> str:
        return f"norm of the gradients that the ranks hold in step 1: {self.held_norm:.4f}"

    def _copied(self) -> list[str]:
        return [
            f"copies along {axis}: gradients of step 1 {_apart(of['gradient'])}, weights at the end "
            f"{_apart(of['weights'])}"
            for axis, of in self.copies.items()
        ]

    def _sent(self) -> list[str]:
        rows = [["sent by a rank in a step", "calls", "planned", "kB", "planned"]]
        for what, of in self.sent.items():
            calls, sizes = ("calls", "planned_calls"), ("bytes", "planned_bytes")
            rows.append([what, *(f"{of[x]:g}" for x in calls), *(f"{of[x] / 1000:.1f}" for x in sizes)])
        each = {rank: f"{before} of {all_}" for rank, (before, all_) in self.sums.items() if all_}
        sums = ", ".join(f"{number} on {rank}" for rank, number in each.items())
        if len({*each.values()}) == 1:
            sums = f"{next(iter(each.values()))} on every rank"
        return [table(rows), *[f"gradient sums waited for before the optimizer: {sums}"] * bool(each)]

    def _times(self) -> list[str]:
        axes = [*next(iter(self.waits_s.values()))]
        rows = [["time of a step", "busy", *(f"{axis}: waits for rank, link" for axis in axes), "others wait for it"]]
        for rank, waits in self.waits_s.items():
            cells = (f"{_ms(late)},{_ms(link)}" for late, link in waits.values())
            rows.append([rank, _ms(self.busy_s[rank]), *cells, _ms(self.waited_for_s[rank])])
        links = [
            f"link of {axis} alone, 64 kB:{_ms(took)}, planned{_ms(planned)}"
            for axis, (took, planned) in self.links_s.items()
        ]
        return [table(rows), *links]


@dataclass(frozen=True)
class RunReport(OwnReport):
    """A run beside one process as well; `dataclasses.asdict` makes plain data of it.

    Attributes:
        losses_alone, norms_alone, samples_alone: of one process.
        by_kind, by_rank: kind of parameter, or rank -> `weights` and `gradient`: distance from one process, as a
            fraction of its norm, before step 1 and in step 1; `size` and `update`: the norms of gradient and update of
            step 1, as multiples of one process.
    """

    losses_alone: list[float]
    norms_alone: list[float]
    samples_alone: list[str]
    by_kind: dict[str, dict[str, float]]
    by_rank: dict[str, dict[str, float]]

    def _steps(self) -> str:
        loss = ("loss", self.losses), ("one process", self.losses_alone)
        return _by_step([*loss, ("norm that clips", self.norms), ("one process", self.norms_alone)])

    def _compared(self) -> list[str]:
        rows = [["step 1 against one process", "weights off", "gradient off", "its size", "update size"]]
        for name, of in (self.by_kind | self.by_rank).items():
            rows.append([name, _off(of["weights"]), _off(of["gradient"]), f"{of['size']:.2f}", f"{of['update']:.2f}"])
        read = _read(self.samples | {"one process": self.samples_alone})
        return [self._held(), table(rows), *self._copied(), *read]


def _by_step(columns: Sequence[tuple[str, list[float]]]) -> str:
    """A row for each step."""
    rows = [["step", *(name for name, _ in columns)]]
    for step, values in enumerate(zip(*(values for _, values in columns), strict=True), 1):
        rows.append([str(step), *(f"{x:.4f}" for x in values)])
    return table(rows)


def _read(samples: dict[str, list[str]]) -> list[str]:
    return [
        f"sequences of step 1, {who}: {' '.join(marks[:8])}{' …' * (len(marks) > 8)}"
        for who, marks in samples.items()
    ]


def _off(distance: float) -> str:
    return "0" if distance < SAME else f"{distance:.1%}"


def _apart(distance: float | None) -> str:
    return "not copied" if distance is None else "equal" if distance < SAME else f"{distance:.1%} apart"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:7.1f} ms"


# ---- from what ranks saw --------------------------------------------------------------------------------------------


def report_of(config: TrainConfig, ranks: Sequence[Seen], alone: Seen | None) -> OwnReport:
    """The report of a run of which these ranks saw the parts: a `RunReport` if one process was seen as well."""
    own = _own(config, ranks)
    if alone is None:
        return OwnReport(**own)
    return RunReport(
        **own,
        losses_alone=alone.report["losses"],
        norms_alone=alone.norms,
        samples_alone=alone.samples,
        by_kind={kind: _parts(ranks, [kind]) for kind in KINDS},
        by_rank={_name(config.layout, rank): _parts([seen], KINDS) for rank, seen in enumerate(ranks)},
    )


def _own(config: TrainConfig, ranks: Sequence[Seen]) -> dict[str, Any]:
    """The fields of an `OwnReport`."""
    layout, names = config.layout, [f"rank {rank}" for rank in range(len(ranks))]
    first = ranks[0]
    replicas = {layout.coordinates(rank)["dp"]: rank for rank in reversed(range(len(ranks)))}
    holders = 1 if layout.zero else layout.dp  # replicas that each hold all gradients
    busy, waits, waited_for = _waiting(config, ranks)
    return dict(
        run=options_text(config),
        losses=first.report["losses"],
        norms=first.norms,
        held_norm=math.sqrt(sum(seen.share for seen in ranks) / holders),
        own_norms={_name(layout, rank): _norms(seen) for rank, seen in enumerate(ranks)},
        copies={axis: _copies(layout, ranks, axis) for axis in ("dp", "tp") if getattr(layout, axis) > 1},
        samples={f"dp {i}": ranks[rank].samples for i, rank in sorted(replicas.items())},
        sent=_sent_and_planned(config, ranks),
        sums=dict(zip(names, map(_sums, ranks), strict=True)),
        busy_s=dict(zip(names, busy, strict=True)),
        waits_s=dict(zip(names, waits, strict=True)),
        waited_for_s=dict(zip(names, waited_for, strict=True)),
        links_s={axis: (max(seen.link_s[axis][0] for seen in ranks), s) for axis, (_, s) in first.link_s.items()},
    )


def _name(layout: Layout, rank: int) -> str:
    here = layout.coordinates(rank)
    return " ".join([f"rank {rank}:", *(f"{axis} {here[axis]}" for axis in AXES if getattr(layout, axis) > 1)])


def _norms(seen: Seen) -> dict[str, float]:
    """Norms of what a rank owns: of all, and of the gradient of each kind."""
    squares = {what: {kind: sums[0] for kind, sums in of.items()} for what, of in seen.squares.items()}
    found = {what: math.sqrt(sum(of.values())) for what, of in squares.items()}
    return found | {kind: math.sqrt(square) for kind, square in squares["gradient"].items()}


def _parts(ranks: Iterable[Seen], kinds: Sequence[str]) -> dict[str, float]:
    """Distances and sizes of what these ranks hold of these kinds."""
    found = {}
    for what in ("weights", "gradient", "update"):
        sums = [seen.squares[what][kind] for seen in ranks for kind in kinds if kind in seen.squares[what]]
        ours, theirs, apart = (math.sqrt(sum(column)) for column in zip(*sums, strict=True))
        found[what] = apart / theirs, ours / theirs
    return {
        "weights": found["weights"][0],
        "gradient": found["gradient"][0],
        "size": found["gradient"][1],
        "update": found["update"][1],
    }


def _copies(layout: Layout, ranks: Sequence[Seen], axis: str) -> dict[str, float | None]:
    groups: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for rank, seen in enumerate(ranks):
        elsewhere = tuple(i for name, i in layout.coordinates(rank).items() if name != axis)
        for (what, name), (x, y, is_copied) in seen.marks.items():
            if axis == "dp" or is_copied:
                groups[what, name, elsewhere].append((x, y))
    found: dict[str, float | None] = {"gradient": None, "weights": None}
    for (what, *_), marks in groups.items():
        size = max(math.hypot(*mark) for mark in marks)
        apart = max(math.dist(mark, marks[0]) for mark in marks) / (size or 1.0)
        found[what] = max(found[what] or 0.0, apart)
    return found


def _sent_and_planned(config: TrainConfig, ranks: Sequence[Seen]) -> dict[str, dict[str, float]]:
    """The messages of a step, and the planned ones: of all ranks the one that is farthest from its plan."""
    plan = planned(config)
    found: dict[str, dict[str, float]] = {}
    for rank, seen in enumerate(ranks):
        traffic = step_traffic(plan, plan.place(rank), plan.ep_place(rank))
        wanted = {f"{kind} {axis}": n for (kind, axis), n in traffic.items()}
        for what in sorted({*wanted, *seen.report["traffic"]}):
            if what.startswith("recv"):
                continue  # a receive sends nothing
            (calls, sent), due = (of.get(what, (0, 0.0)) for of in (seen.report["traffic"], wanted))
            of = {"calls": calls / config.steps, "planned_calls": due[0]}
            of |= {"bytes": sent / config.steps, "planned_bytes": due[1], "rank": rank}
            if what not in found or _deviation(of) > _deviation(found[what]):
                found[what] = of
    return found


def _deviation(of: dict[str, float]) -> float:
    return abs(of["bytes"] - of["planned_bytes"]) + abs(of["calls"] - of["planned_calls"])


def _sums(seen: Seen) -> tuple[int, int]:
    """Gradient sums of step 1 that this rank waited for before its optimizer began, and all of them."""
    sums = [wait for wait in seen.waits if wait.sums_gradients and wait.step == 0]
    return sum(wait.to_s <= seen.optimizer_s[0] for wait in sums), len(sums)


def _waiting(
    config: TrainConfig, ranks: Sequence[Seen]
) -> tuple[list[float], list[dict[str, tuple[float, float]]], list[float]]:
    """For each rank: seconds in which it is busy; axis -> those in which it waits, by cause; those it is waited for."""
    messages: dict[tuple, list[tuple[int, Waited]]] = defaultdict(list)  # the ranks of a message, which calls alike
    for rank, seen in enumerate(ranks):
        counts: Counter[tuple[int, str]] = Counter()
        for wait in sorted(seen.waits, key=lambda wait: wait.start_s):
            messages[wait.step, wait.channel, counts[wait.step, wait.channel]].append((rank, wait))
            counts[wait.step, wait.channel] += 1
    axes, steps = [axis for axis in AXES if getattr(config.layout, axis) > 1], range(WARMUP, config.steps)
    busy = [[seen.ended_s[step] - seen.began_s[step] for step in steps] for seen in ranks]
    late, link = ([{axis: [0.0] * len(steps) for axis in axes} for _ in ranks] for _ in range(2))
    waited_for = [[0.0] * len(steps) for _ in ranks]
    for (step, *_), of in messages.items():
        last_s, who = max((wait.start_s, rank) for rank, wait in of)
        for rank, wait in of if step in steps else ():
            took = wait.to_s - wait.from_s
            for_rank = min(max(last_s - wait.from_s, 0.0), took)
            axis = next(axis for axis in axes if axis in wait.axis.split("×") or wait.axis == "world")
            k = step - WARMUP
            busy[rank][k] -= took
            late[rank][axis][k] += for_rank
            link[rank][axis][k] += took - for_rank
            waited_for[who][k] += for_rank
    waits = [{axis: (min(late[rank][axis]), min(link[rank][axis])) for axis in axes} for rank in range(len(ranks))]
    return [*map(min, busy)], waits, [*map(min, waited_for)]
