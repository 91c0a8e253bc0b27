"""A place to try schedules: type one, and read its verdict.

The problem: a wrong schedule shows its fault late, as a hang or as weights trained with half of the gradients. A right
schedule does not show how good it is. The idea: a verdict instead of an exception. If the schedule is wrong, the
verdict marks the action and explains the fault. If it is right, the verdict compares its time and memory with the
schedules of this book, and names the next improvement.

    workshop("0F0 0I0 0W0\\n1F0 1I0 1W0", Par(2, 1))

Nothing runs here: `verdict.schedule` is for `book.trials.rehearse`, `verdict.timeline` for a picture.
Read before: `lib/pipeline/prove.py`, `lib/pipeline/simulate.py`. Page: Try a schedule.
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
from lib.pipeline.schedules.action import Action, Fault, Op, Schedule, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from lib.pipeline.simulate import Costs, Slot, Timeline, simulate

SLACK = 1e-9  # times that differ by less are equal

_LETTERS = "F is forward, B the full backward, I and W are its two halves. Write blanks between actions."
WHY = {  # the meaning of each fault, for a learner
    Fault.OTHER_SIZES: "Times and memory compare only where the work is the same.",
    Fault.UNEQUAL: "A rank with more stages would be the slowest, and all others would wait for it.",
    Fault.NO_BACKWARD: "An evaluation runs forward alone; par is for a step of training.",
    Fault.EMPTY: _LETTERS,
    Fault.NO_ACTION: _LETTERS,
    Fault.OTHER_LINE: "Lines are ranks in order, from rank 0: a label must agree with its line.",
    Fault.NO_RANK: "A microbatch passes through all stages, so every number up to the last needs a rank.",
    Fault.WRONG_RANK: "One rank holds the weights of a stage, so all actions of the stage run there.",
    Fault.HALF_AGAIN: "B is I and W in one. Write B, or I and later W.",
    Fault.REPEATED: "If it ran twice, its gradient would count twice.",
    Fault.HALF: "I without W: these weights lack a gradient. W without I: W needs tensors that I keeps for it.",
    Fault.MISSING: "Each microbatch runs once forward and once backward in each stage, or its gradient is missing.",
    Fault.TOO_EARLY: "A backward uses activations that its own forward kept, and W uses gradients that I kept.",
    Fault.CIRCLE: "None of these ranks can continue before another rank does. Move an awaited action to before a wait.",
    Fault.ENDLESS: "The awaited action never runs. Is it missing, or does it come after the wait on the same rank?",
}
SHORT = "Write a line for each rank; an action is a stage, then F, B, I or W, then a microbatch: 0F0 0F1 0B0 0B1."


@dataclass(frozen=True)
class Score:
    """How long a schedule takes and how much it keeps.

    Args:
        time: from the first action to the last.
        bubble: idle fraction of the time of all ranks.
        kept: per rank, the most microbatches at a time; with two stages on a rank, each counts half in each stage.
        in_limit: whether every rank keeps to the limit.
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
    """A task: ranks, microbatches, times and a memory limit, and the scores of the book's schedules in it.

    Args:
        limit: microbatches that a rank may keep at a time. Default: one for each rank, as rank 0 of 1F1B keeps.
        costs: of all layers of a rank, equal on all ranks; the stages of a rank share them equally.

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
        """Simulate the schedule, with the times of a rank divided among its stages."""
        share, costs = schedule.num_ranks / schedule.num_stages, self.costs
        times = (share * time for time in (costs.F, costs.I, costs.W))
        return simulate(schedule, Costs(*times, latency=costs.latency, transfer=costs.transfer))

    def score(self, timeline: Timeline, name: str = "") -> Score:
        """The score of a timeline from `play`."""
        schedule = timeline.schedule
        share = schedule.num_ranks / schedule.num_stages
        kept = tuple(share * timeline.peak(rank) for rank in range(schedule.num_ranks))
        in_limit = max(kept) <= self.most
        return Score(name or schedule.name, timeline.makespan, timeline.bubble, kept, in_limit)

    def scores(self) -> list[Score]:
        """Scores of schedules of this book, the fastest first; without ZB-V, with which a reader can be under par."""
        n, m = self.num_ranks, self.num_microbatches
        known = [make(n, m) for make in (zb_h1, zb_h2, one_f_one_b, gpipe, naive)]
        known += [interleaved(n, m, 2)] if m % n == 0 else []
        return sorted((self.score(self.play(one)) for one in known), key=lambda score: score.time)

    @property
    def time(self) -> float:
        """Par: the best time of a schedule of this book that keeps to the limit; if none does, the best time."""
        scores = self.scores()
        return min((s.time for s in scores if s.in_limit), default=scores[0].time)

    def least(self, stages_per_rank: int = 1) -> float:
        """A lower bound for every order: all work of a rank, and the wait that no action can fill.

        The last rank waits until a first microbatch passes the previous ranks. Rank 0 may start as many
        microbatches as it may keep; then it waits for the gradient of the first.
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
    """The verdict on a schedule, readable in a terminal and in a notebook.

    Args:
        schedule: the typed schedule, None if it cannot be read.
        timeline: times of its actions, None if it is wrong.
        score: None if it is wrong.
        error: the fault and its place; None if it is right.
        advice: why it is wrong, or the next improvement.
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
        """This score among the book's, the fastest first; none if it is wrong."""
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
    """Judge a typed schedule. A wrong schedule raises no exception: the verdict contains its fault.

    Args:
        text: a line for each rank, as `Schedule.from_text` reads it.
        par: the task to compare with; default: 4 ranks and 6 microbatches, F = I = W = 1.
    """
    par, schedule = par or Par(), None
    try:
        schedule = Schedule.from_text(str(text), name)
        _fits(schedule, par)
        prove(lower(prove(schedule)))
    except ScheduleError as error:
        return Verdict(par, schedule, error=error, advice=WHY.get(error.kind, SHORT))
    except ValueError:  # from `int`, for thousands of digits
        error = ScheduleError("a number in it is too long for a stage or a microbatch", Fault.NO_ACTION)
        return Verdict(par, error=error, advice=SHORT)
    timeline = par.play(schedule)
    return Verdict(par, schedule, timeline, par.score(timeline), advice=_next(timeline, par))


def _fits(schedule: Schedule, par: Par) -> None:
    """Raise unless the schedule has the ranks and microbatches of par, equal numbers of stages, and a backward."""
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
            "the same number of stages",
            Fault.UNEQUAL,
        )
    if schedule.is_forward_only:
        raise ScheduleError("it has no backward, so there is no gradient: add B, or I and W", Fault.NO_BACKWARD)


def _next(timeline: Timeline, par: Par) -> str:
    """The next improvement, in one or two sentences."""
    schedule, score = timeline.schedule, par.score(timeline)
    per_rank = schedule.num_stages // schedule.num_ranks
    if not score.in_limit:
        rank = max(range(par.num_ranks), key=score.kept.__getitem__)
        return (
            f"Rank {rank} keeps {score.kept[rank]:g} microbatches; the limit is {par.most}. Start fewer forwards "
            "there before the first backward, or run a W sooner."
        )
    if score.time <= par.least(per_rank) + SLACK:
        return (
            f"No order is faster: {par.least(per_rank):g} is all work of a rank and a wait that no action can fill. "
            f"Now keep less: your ranks keep {sum(score.kept):g} microbatches together."
        )
    if whole := [slot.action for slot in timeline.compute if slot.action.op == Op.B and slot.action.stage]:
        stage, _, m = whole[-1]
        return (
            f"The previous stage waits for a full B and needs half of it. Write {stage}I{m} {stage}W{m} for "
            f"{stage}B{m}, and the same elsewhere; then put a W where its rank waits."
        )
    holes = sorted(_holes(timeline), key=lambda hole: hole[0].end - hole[1].start)
    for before, slot in holes:
        if late := _could_fill(timeline, before, slot):
            return (
                f"Rank {slot.rank} is idle from {before.end:g} to {slot.start:g}. Its {late} could run then: "
                f"put it before {slot.action}."
            )
    if in_the_way := _in_the_way(timeline, par.costs.latency + par.costs.transfer):
        weight, behind = in_the_way
        return (
            f"{weight} delays {behind}, and through it the last action of all. No rank waits for a W: defer it until "
            "its rank is idle."
        )
    if holes:
        before, slot = holes[0]
        return (
            f"Rank {slot.rank} is idle from {before.end:g} to {slot.start:g}, and no W is ready. The input of "
            f"{slot.action} must arrive sooner; or run one more forward before it, if the limit allows."
        )
    return "No rank waits between two of its actions. The rest is at the ends: let the first gradients arrive sooner."


def _holes(timeline: Timeline) -> list[tuple[Slot, Slot]]:
    """The actions before and after each wait between two actions of a rank."""
    found = []
    for rank in range(timeline.schedule.num_ranks):
        mine = [slot for slot in timeline.compute if slot.rank == rank]
        found += [(a, b) for a, b in pairwise(mine) if b.start - a.end > SLACK]
    return found


def _could_fill(timeline: Timeline, before: Slot, slot: Slot) -> str:
    """A W of the rank that comes after a wait and could fill it; empty if there is none."""
    mine = [one for one in timeline.compute if one.rank == slot.rank]
    ready = {one.action[::2] for one in mine if one.action.op == Op.I and one.end <= before.end + SLACK}
    late = (one.action for one in mine if one.action.op == Op.W and one.start >= slot.start)
    return next((str(action) for action in late if action[::2] in ready), "")


def _in_the_way(timeline: Timeline, hop: float) -> tuple[Action, Action] | None:
    """A W on the critical path, not on the rank that ends last, and the next action on this path.

    Args:
        hop: the time of a message between two ranks. An action whose input arrives just as its rank is free would
            start no sooner without the W before it: the path goes on with the message.
    """
    last = slot = max(timeline.compute, key=lambda slot: slot.end)
    while True:
        sender = _sender(timeline, slot)
        if sender and sender.end + hop >= slot.start - SLACK:
            slot = sender
            continue
        earlier = [one for one in timeline.compute if one.rank == slot.rank and one.end <= slot.start + SLACK]
        before = max(earlier, key=lambda one: one.end, default=None)
        if before is None or before.end < slot.start - SLACK:
            return None
        if before.action.op == Op.W and slot.rank != last.rank:
            return before.action, slot.action
        slot = before


def _sender(timeline: Timeline, slot: Slot) -> Slot | None:
    """The action on a different rank that computes the input of this one; None if there is none."""
    if (message := message_before(slot.action, timeline.schedule)) is None:
        return None
    stage, op, m = message[1]
    ops = (Op.F,) if op == Op.SEND_F else (Op.B, Op.I)
    return next(one for one in timeline.compute if one.action in [(stage, op, m) for op in ops])
