"""A place to try schedules: type one, and read what becomes of it.

The problem: whoever invents a schedule learns too late what is wrong with it, from a hang or from weights that learn
from half of the gradients. And one that is right says nothing of how good it is. The idea: a verdict in place of an
exception. Where the schedule is wrong, it shows the place and says why that cannot be. Where it is right, it puts its
time and memory beside those of the schedules of this book, and says where the next unit is to be had.

    workshop("0F0 0I0 0W0\\n1F0 1I0 1W0", Par(2, 1))

Nothing is run here: `verdict.schedule` is for `lib.pipeline.rehearse`, `verdict.timeline` for a picture.
Read before: `lib/pipeline/prove.py`, `lib/pipeline/simulate.py`. Page: the schedule workshop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from lib.pipeline.gantt import gantt
from lib.pipeline.lower import lower, message_before
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.schedules.fault import Fault, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from lib.pipeline.simulate import Costs, Slot, Timeline, simulate

SLACK = 1e-9  # times that differ by less are equal

_LETTERS = "F is forward, B the whole backward, I and W are its two halves. Blanks go between actions."
WHY = {  # what a fault means to somebody who is learning
    Fault.OTHER_SIZES: "Times and memory compare only where the work is the same.",
    Fault.UNEQUAL: "A rank with more stages would be the slowest, and all others would wait for it.",
    Fault.NO_BACKWARD: "An evaluation has no bubble to fill; training does.",
    Fault.EMPTY: _LETTERS,
    Fault.NO_ACTION: _LETTERS,
    Fault.OTHER_LINE: "Lines are ranks, from rank 0 downward, whatever they are called.",
    Fault.NO_RANK: "A microbatch passes through all stages, so every number up to the last needs a rank.",
    Fault.WRONG_RANK: "A stage's weights lie on one rank, and all that is done with them is done there.",
    Fault.HALF_AGAIN: "B is I and W in one. Write B, or I and later W.",
    Fault.REPEATED: "Done twice, its gradient would count twice.",
    Fault.HALF: "I without W: these weights would not learn from that microbatch. W without I: nothing to do.",
    Fault.MISSING: "Each microbatch goes once forward and once back through each stage, or its gradient is missing.",
    Fault.TOO_EARLY: "A backward uses what its own forward has left behind, and W what I has left behind.",
    Fault.CIRCLE: "None of these ranks can go on before another one does. Put what is waited for in front of the wait.",
    Fault.ENDLESS: "What it waits for is never done. Is it missing, or behind the wait on the same rank?",
}
SHORT = "Write a line for each rank: a stage's number, F, B, I or W, and the microbatch's, such as 0F0 0F1 0B0 0B1."


@dataclass(frozen=True)
class Score:
    """How long a schedule takes and how much it keeps.

    Args:
        time: from the first action to the last.
        bubble: the part of all ranks' time in which they did not compute.
        kept: by each rank, the most microbatches at a time, counted in all the layers that a rank has.
        in_limit: whether no rank keeps more than it may.
    """

    name: str
    time: float
    bubble: float
    kept: tuple[float, ...]
    in_limit: bool

    def words(self) -> tuple[str, str, str, str, str]:
        kept = " ".join(f"{count:g}" for count in self.kept)
        return self.name, f"{self.time:g}", f"{self.bubble:.1%}", kept, "" if self.in_limit else "too much"


@dataclass(frozen=True)
class Par:
    """A course: ranks, microbatches, times and a memory limit, and what the book's schedules need for it.

    Args:
        limit: microbatches that a rank may keep at a time. Default: one for each rank, as rank 0 of 1F1B keeps.
        costs: of all layers that a rank has, the same on each; several stages on a rank have equal parts of them.

    Raises:
        ValueError: a number below 1, or costs that differ from stage to stage.
    """

    num_ranks: int = 4
    num_microbatches: int = 6
    limit: int | None = None
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "most"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('most', 'limit')}={getattr(self, name)} must be at least 1")
        if any(isinstance(value, Sequence) for value in (self.costs.F, self.costs.I, self.costs.W)):
            raise ValueError("give par one number each for F, I and W: its ranks are alike")

    @property
    def most(self) -> int:
        """Microbatches that a rank may keep."""
        return self.num_ranks if self.limit is None else self.limit

    def play(self, schedule: Schedule) -> Timeline:
        """The schedule in time, with a rank's times divided among its stages."""
        share, costs = schedule.num_ranks / schedule.num_stages, self.costs
        times = (share * time for time in (costs.F, costs.I, costs.W))
        return simulate(schedule, Costs(*times, latency=costs.latency, transfer=costs.transfer))

    def score(self, timeline: Timeline, name: str = "") -> Score:
        """Of a timeline that `play` gave."""
        schedule = timeline.schedule
        share = schedule.num_ranks / schedule.num_stages
        kept = tuple(share * timeline.peak(rank) for rank in range(schedule.num_ranks))
        in_limit = max(kept) <= self.most
        return Score(name or schedule.name, timeline.makespan, timeline.bubble, kept, in_limit)

    def scores(self) -> list[Score]:
        """Of schedules of this book, the fastest first; ZB-V is left for somebody to be under par with."""
        n, m = self.num_ranks, self.num_microbatches
        known = [make(n, m) for make in (zb_h1, zb_h2, one_f_one_b, gpipe, naive)]
        known += [interleaved(n, m, 2)] if m % n == 0 else []
        return sorted((self.score(self.play(one)) for one in known), key=lambda score: score.time)

    @property
    def time(self) -> float:
        """Par: the best time of a schedule of this book that keeps to the limit; without one, the best time."""
        scores = self.scores()
        return min((s.time for s in scores if s.in_limit), default=scores[0].time)

    def least(self, stages_per_rank: int = 1) -> float:
        """No order takes less: all work of a rank, and the wait that nothing can fill.

        The last rank waits until a first microbatch has passed the others. Rank 0 may begin as many as it may keep;
        then it waits until the first of them is back.
        """
        n, costs = self.num_ranks, self.costs
        work = self.num_microbatches * (costs.F + costs.I + costs.W)
        hop = costs.latency + costs.transfer
        last_waits = (n - 1) * (costs.F / stages_per_rank + hop)
        first_back = n * costs.F + (n - 1) * (costs.I + 2 * hop)
        may_start = min(self.most, self.num_microbatches)
        first_waits = first_back - may_start * costs.F if stages_per_rank == 1 else 0
        return work + max(last_waits, first_waits)


@dataclass(frozen=True, repr=False)
class Verdict:
    """What becomes of a schedule, readable in a terminal and in a notebook.

    Args:
        schedule: what was typed, None if it cannot be read.
        timeline: when it runs, None if it is wrong.
        score: None if it is wrong.
        error: what is wrong, and where; None if nothing is.
        advice: why that cannot be, or what to try next.
    """

    par: Par
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    score: Score | None = None
    error: ScheduleError | None = None
    advice: str = ""

    @property
    def problem(self) -> str:
        """The error in words; empty if there is none."""
        return str(self.error or "")

    def rows(self) -> list[Score]:
        """This one between the book's, the fastest first; none if it is wrong."""
        if self.score is None:
            return []
        return sorted([self.score, *self.par.scores()], key=lambda score: score.time)

    def headline(self) -> str:
        if self.score is None:
            return "This cannot work."
        par, over = self.par.time, self.score.time - self.par.time
        beside = f"{abs(over):g} {'over' if over > 0 else 'under'} par, which is {par:g}"
        beside = "that is par" if abs(over) < SLACK else beside
        limit = "" if self.score.in_limit else f", but a rank keeps more than {self.par.most}"
        return f"It works, in {self.score.time:g} units: {beside}{limit}."

    def __repr__(self) -> str:
        if self.score is None:
            return "\n".join([self.headline(), self.problem, self.advice])
        mark = [">" if score is self.score else " " for score in self.rows()]
        table = [("", "time", "bubble", "kept by each rank", ""), *(score.words() for score in self.rows())]
        wide = [max(len(row[i]) for row in table) for i in range(5)]
        lines = [
            f"{m} {row[0]:{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]:{wide[3]}}  {row[4]}".rstrip()
            for m, row in zip([" ", *mark], table, strict=True)
        ]
        return "\n".join([self.headline(), *lines, gantt(self.timeline), self.advice])

    def _repr_html_(self) -> str:
        parts = [f"<p><strong>{escape(self.headline())}</strong></p>"]
        if self.score is None:
            parts.append(_letters(self.problem))
        else:
            names = ("schedule", "time", "bubble", "kept by each rank", "limit")
            head, body = "".join(f'<th scope="col">{name}</th>' for name in names), ""
            for score in self.rows():
                tag = "strong" if score is self.score else "span"
                body += (
                    "<tr>" + "".join(f"<td><{tag}>{escape(word)}</{tag}></td>" for word in score.words()) + "</tr>"
                )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
            parts.append(_letters(gantt(self.timeline)))
        return f'<div class="pbh-workshop">{"".join(parts)}<p>{escape(self.advice)}</p></div>'


def _letters(lines: str) -> str:
    return f'<pre style="overflow-x:auto" tabindex="0">{escape(lines)}</pre>'


def workshop(text: str, par: Par | None = None, name: str = "yours") -> Verdict:
    """The verdict on a schedule that somebody has typed. It raises nothing: what is wrong is said.

    Args:
        text: a line for each rank, as `Schedule.from_text` reads it.
        par: what it is compared with; default: that of 4 ranks and 6 microbatches, F = I = W = 1.
    """
    par, schedule = par or Par(), None
    try:
        schedule = Schedule.from_text(str(text), name)
        _fits(schedule, par)
        prove(lower(prove(schedule)))
    except ScheduleError as error:
        return Verdict(par, schedule, error=error, advice=WHY.get(error.kind, SHORT))
    except ValueError:  # Python's own, of thousands of digits
        error = ScheduleError("a number in it is too long for a stage or a microbatch", Fault.NO_ACTION)
        return Verdict(par, error=error, advice=SHORT)
    timeline = par.play(schedule)
    return Verdict(par, schedule, timeline, par.score(timeline), advice=_next(timeline, par))


def _fits(schedule: Schedule, par: Par) -> None:
    """Whether it is a schedule of as many ranks and microbatches, with a backward."""
    sizes = schedule.num_ranks, schedule.num_microbatches
    if sizes != (par.num_ranks, par.num_microbatches):
        raise ScheduleError(
            f"this is for {sizes[0]} ranks and {sizes[1]} microbatches, par is for {par.num_ranks} and "
            f"{par.num_microbatches}; write all of them, or compare with Par{sizes}",
            Fault.OTHER_SIZES,
        )
    counts = Counter(schedule.rank_of)
    if len(counts) < par.num_ranks or len({*counts.values()}) > 1:
        raise ScheduleError(
            "ranks with different numbers of stages have different work, and par is for equal work: give each rank "
            "as many stages",
            Fault.UNEQUAL,
        )
    if schedule.is_forward_only:
        raise ScheduleError("nothing goes backward, so nothing is learned: add B, or I and W", Fault.NO_BACKWARD)


def _next(timeline: Timeline, par: Par) -> str:
    """Where there is something to be had, in one or two sentences."""
    schedule, score = timeline.schedule, par.score(timeline)
    per_rank = schedule.num_stages // schedule.num_ranks
    if not score.in_limit:
        rank = max(range(par.num_ranks), key=score.kept.__getitem__)
        return (
            f"Rank {rank} keeps {score.kept[rank]:g} microbatches; the limit is {par.most}. Start fewer forwards "
            "there before the first backward, or do a W sooner."
        )
    if score.time <= par.least(per_rank) + SLACK:
        return (
            f"No order is faster: {par.least(per_rank):g} is all work of a rank and the wait that nothing can fill. "
            f"Now keep less: your ranks keep {sum(score.kept):g} microbatches together."
        )
    if whole := [slot.action for slot in timeline.compute if slot.action.op == Op.B]:
        stage, _, m = whole[-1]
        return (
            f"The stage before waits for the whole of a B and needs half of it. Write {stage}I{m} {stage}W{m} for "
            f"{stage}B{m}, and the same elsewhere; then put a W where its rank waits."
        )
    holes = sorted(_holes(timeline), key=lambda hole: hole[0].end - hole[1].start)
    for before, slot in holes:
        if late := _could_fill(timeline, before, slot):
            return (
                f"Rank {slot.rank} does nothing from {before.end:g} to {slot.start:g}. Its {late} could be done then: "
                f"put it in front of {slot.action}."
            )
    if in_the_way := _in_the_way(timeline):
        weight, behind = in_the_way
        return (
            f"{weight} holds up {behind}, and with it the last action of all. Nobody waits for a W: put it off, to "
            "where its rank has nothing better to do."
        )
    if holes:
        before, slot = holes[0]
        return (
            f"Rank {slot.rank} does nothing from {before.end:g} to {slot.start:g}, and no W is ready: {slot.action} "
            "must come sooner, from the ranks behind it; or start another forward in front of it, if the limit allows."
        )
    return (
        "No rank waits between two of its actions. What is left is at the ends: let the first gradients come sooner."
    )


def _holes(timeline: Timeline) -> list[tuple[Slot, Slot]]:
    """The actions before and behind each wait in the middle of a rank's work."""
    found = []
    for rank in range(timeline.schedule.num_ranks):
        mine = [slot for slot in timeline.compute if slot.rank == rank]
        found += [(a, b) for a, b in pairwise(mine) if b.start - a.end > SLACK]
    return found


def _could_fill(timeline: Timeline, before: Slot, slot: Slot) -> str:
    """A W of the rank that comes behind a hole and could be in it; empty if there is none."""
    mine = [one for one in timeline.compute if one.rank == slot.rank]
    ready = {one.action[::2] for one in mine if one.action.op == Op.I and one.end <= before.end + SLACK}
    late = (one.action for one in mine if one.action.op == Op.W and one.start >= slot.start)
    return next((str(action) for action in late if action[::2] in ready), "")


def _in_the_way(timeline: Timeline) -> tuple[Action, Action] | None:
    """A W, and what comes behind it, among the actions that the last one had to wait for, on another rank."""
    slot_of = {slot.action: slot for slot in timeline.compute}
    last = slot = max(timeline.compute, key=lambda slot: slot.end)
    while True:
        earlier = [one for one in timeline.compute if one.rank == slot.rank and one.end <= slot.start + SLACK]
        before = max(earlier, key=lambda one: one.end, default=None)
        if before is None or before.end < slot.start - SLACK:  # it waited for another rank
            message = message_before(slot.action, timeline.schedule)
            if message is None:
                return None
            stage, op, m = message[1]
            ops = (Op.F,) if op == Op.SEND_F else (Op.B, Op.I)
            slot = next(slot_of[stage, op, m] for op in ops if (stage, op, m) in slot_of)
        elif before.action.op == Op.W and slot.rank != last.rank:
            return before.action, slot.action
        else:
            slot = before
