"""The walk along the chain of a step, until the first link that differs: the rule of the page on wrong runs.

A step is a chain: weights, data, loss, gradients, norm, clipped gradients, options, updates, buffers. What a mistake
touches differs from its link on, so the first link that differs is the one that says most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lib.doctor.numbers.links import (
    buffers_not_compared,
    has_cut_rows,
    loss_differs,
    of_buffers,
    of_data,
    of_norm,
    of_options,
    of_weights,
)
from lib.doctor.numbers.patterns import Said
from lib.doctor.numbers.recorded_numbers import KINDS, Numbers
from lib.doctor.numbers.recorded_pattern import said_of_sides
from lib.doctor.numbers.share import Share, Sides, shares
from lib.doctor.numbers.side_by_side import Side, check_same_model, shared_names
from lib.runtime.words import counted, few

CHAIN = ("weights", "data", "loss", "gradients", "norm", "clipped", "options", "updates", "buffers")
MOST_DOUBTFUL = 0.1  # of all tensors: the bias of keys is one of about twelve in a block
CALLS = {"data": "batch", "loss": "backward", "gradients": "backward", "norm": "norm"}  # that show a link


@dataclass
class Difference:
    """A link that differs. `cause` is a short name of the mistake with such a pattern; `text` has the numbers."""

    step: int
    link: str
    cause: str
    text: str


@dataclass
class Comparison:
    """What two runs have in common, and where they part.

    Attributes:
        findings: of the first link that differs; none if nothing differs.
        remarks: facts about the runs, and differences that do not change the training.
        looked_at: link → how many tensors were compared, and how many of them are zero except for rounding.
        not_seen: a sentence for each thing that was not compared.
        shares: of the tensors of the link that differs.
        allowed: kind of tensors → the largest distance that rounding may explain.
        has_gaps: whether tensors of a link that was looked at could not be compared.
    """

    ours: Numbers
    one: Numbers
    exact: Numbers | None
    findings: list[Difference] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    looked_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    not_seen: list[str] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    allowed: dict[str, float] = field(default_factory=dict)
    has_gaps: bool = False

    @property
    def exit_code(self) -> int:
        """1: they differ. 2: gradients or updates could not all be compared. 0: the same training."""
        if self.findings:
            return 1
        compared = "gradients" in self.looked_at and "updates" in self.looked_at
        return 0 if compared and not self.has_gaps else 2


def compare_numbers(one: Numbers, ours: Numbers, exact: Numbers | None = None) -> Comparison:
    """Where a run parts from one process, or from any layout that is trusted.

    Args:
        one: the run that counts as right.
        ours: the run in question, of any layout.
        exact: one process in a wider type, which shows how large the rounding of `one` is.

    Raises:
        ValueError: they are not runs of one model, batch and number of steps; it says the difference.
    """
    runs = [run for run in (one, ours, exact) if run is not None]
    aliases = shared_names(*runs)
    for other in runs[1:]:
        check_same_model(one, other, aliases)
    found = Comparison(ours, one, exact)
    for step in range(one.steps):
        sides = Sides(*(Side(run, step, aliases) if run else None for run in (ours, one, exact)), step)
        if not step:
            _note_types(found, sides)
            if exact:
                _check_exact(sides)
        for link in CHAIN:
            found.findings = [Difference(step + 1, link, *said) for said in _differences(found, sides, link)]
            if found.findings:
                return found
    return found


def _note_types(found: Comparison, sides: Sides) -> None:
    """Facts about the two runs, before any comparison."""
    types = [
        sorted({held.part.dtype.removeprefix("torch.") for held in side.held("weights")})
        for side in (sides.ours, sides.one)
    ]
    if types[0] != types[1]:
        ours, one = (" and ".join(names) for names in types)
        found.remarks.append(
            f"the weights are {ours} in this run, and {one} in the reference: that rounds differently"
        )
    if names := sorted({name for rank in sides.ours.run.ranks for name in rank.left_out}):
        found.not_seen.append(f"{counted(len(names), 'frozen parameter')} of integers ({few(names)})")
    if strangers := max(step.strangers for step in sides.ours.steps):
        found.not_seen.append(f"{counted(strangers, 'tensor')} of the optimizer that are no parameters of the model")


def _check_exact(sides: Sides) -> None:
    """Raise ValueError if the exact step is none: of different weights or rows, or not computed in a wider type."""
    there, one = sides.right.run.folder, sides.one.run.folder
    weights = shares(Sides(sides.one, sides.right, None, 0), "weights")
    if any(share.apart > 0.02 for share in weights.shares):
        raise ValueError(f"{there} begins with different weights than {one}: start both from the same")
    one_rows, exact_rows = ({row for step in side.steps for row in step.rows} for side in (sides.one, sides.right))
    if one_rows and exact_rows and one_rows != exact_rows:
        raise ValueError(f"{there} reads different rows than {one}: give both the same batch")
    right, base = sides.right.vectors("clipped"), sides.one.vectors("clipped")
    if right and all(bool((right[name] == base[name]).all()) for name in right if name in base):
        raise ValueError(f"{there} has the same gradients as {one}, in each bit: record it in a wider type")


def _differences(found: Comparison, sides: Sides, link: str) -> list[Said]:
    """Look at one link, and note it."""
    if link in KINDS:
        return _tensors(found, sides, link)
    if not _is_recorded(found, sides, link):
        return []
    if link == "norm" and not sides.ours.held("gradients"):
        return []  # said of the gradients
    has_places = all(any(step.places for step in side.steps) for side in (sides.ours, sides.right))
    if link == "data" and has_cut_rows(sides) and not has_places:
        _once(found.not_seen, "the data: rows are cut, and batch() got tensors without a second dimension in common")
        return []
    found.looked_at[link] = 0, 0
    if link == "loss":
        return list(_loss(found, sides))
    if link == "buffers" and (names := buffers_not_compared(sides)):
        _once(found.not_seen, f"{counted(len(names), 'buffer')} ({few(names)}): in a single run, cut, or integers")
    rules = {"data": of_data, "norm": of_norm, "options": of_options, "buffers": of_buffers}
    return list(rules[link](sides))


def _tensors(found: Comparison, sides: Sides, kind: str) -> list[Said]:
    if kind == "gradients" and not _is_recorded(found, sides, "gradients"):
        return []
    if kind == "updates" and any(step.strangers and not step.settled for step in sides.ours.steps):
        _once(
            found.not_seen,
            f"the updates of step {sides.step + 1}: its optimizer steps tensors of its own, which the program may copy "
            "into the model later; let it take one step more",
        )
        return []
    compared = shares(sides, kind)
    _note_unseen(found, sides, kind, compared.unseen)
    if doubtful := list(dict.fromkeys(compared.doubtful)):
        found.has_gaps |= len(doubtful) > MOST_DOUBTFUL * len(sides.right.names(kind))
        _once(
            found.not_seen,
            f"{kind} of {counted(len(doubtful), 'tensor')} ({few(doubtful)}): they differ, and are so small "
            "that rounding may be the reason; one process in a wider type (--exact) tells",
        )
    if not sides.ours.run.whole and _only_whole_tensors(sides, kind):
        _once(found.not_seen, "ranks one by one: the reference has no sums of their shards; record it with like=")
    seen = {share.name for share in compared.shares}
    if seen or compared.zeros:
        counts = len(seen | {*compared.zeros}), len({*compared.zeros} - seen)
        found.looked_at[kind] = max(found.looked_at.get(kind, (0, 0)), counts)
    for share in compared.shares:
        found.allowed[kind] = max(found.allowed.get(kind, 0.0), share.allowed)
    _excuse_atomics(found, sides, compared.shares)
    if kind == "weights":
        said = list(of_weights(sides, compared.shares))
    else:
        said = said_of_sides(sides, kind, compared.shares)
    found.shares = compared.shares if said else []
    return said


def _only_whole_tensors(sides: Sides, kind: str) -> bool:
    """Whether the reference has no sums of some shard of ours."""
    for held in sides.ours.held(kind):
        known = sides.right.vector(kind, held.name, held.part.region) is not None
        if held.part.region.numel and not known and held.name in sides.right.vectors(kind):
            return True
    return False


def _excuse_atomics(found: Comparison, sides: Sides, compared: list[Share]) -> None:
    """On a GPU, copies that differ in bits, and by no more than rounding, may be right: say so instead."""
    if sides.ours.run.ranks[0].device == "cpu":
        return
    rounded = [share for share in compared if share.copies_differ and share.apart <= share.allowed]
    for share in rounded:
        share.copies_differ = ()
    if rounded:
        _once(
            found.remarks,
            f"copies of {rounded[0].name} differ in bits, and by no more than rounding: atomic additions of a GPU may "
            "do that. Record the same run twice and compare the two: if they differ as much, it is the GPU",
        )


def _loss(found: Comparison, sides: Sides) -> Iterator[Said]:
    """If the loss differs, its gradients say why."""
    text = loss_differs(sides)
    if text is None:
        return
    if not sides.ours.held("gradients") or not sides.right.held("gradients"):
        yield "wrong terms", f"{text}; no gradients were recorded that could say more"
        return
    compared = shares(sides, "gradients").shares
    said = said_of_sides(sides, "gradients", compared)
    if not said:
        _once(
            found.remarks, f"step {sides.step + 1}: {text}, while the gradients are right: only this number differs"
        )
        return
    found.shares = compared
    for cause, words in said:
        yield cause, f"{text}; of the gradients {words}"


def _is_recorded(found: Comparison, sides: Sides, link: str) -> bool:
    """Whether both runs show a link; else it is noted what is missing where."""
    attribute = {"data": "rows", "gradients": "tensors"}.get(link, link)
    for side in (sides.ours, sides.right):
        values = [getattr(step, attribute) for step in side.steps]
        if link == "gradients":
            values = [value["gradients"] for value in values]
        if all(value is None or value in ([], {}) for value in values):
            if link == "norm" and side is sides.right:
                continue  # the norm is compared with the gradients of the same run
            if link == "options":
                why = "the optimizer's tensors are no parameters of the model"
            elif link == "buffers":
                return False  # the model has none
            else:
                why = f"{CALLS[link]}() was not called in the program"
            _once(found.not_seen, f"the {link}: {why}")
            return False
    return True


def _note_unseen(found: Comparison, sides: Sides, kind: str, unseen: list[str]) -> None:
    """Say what was not compared; a tensor that one run does not have at all, the pattern says."""
    unseen = list(dict.fromkeys(name for name in unseen if name in sides.right.names(kind)))
    if not unseen:
        return
    found.has_gaps = True
    if kind == "updates":
        why = "smaller than the distance of two neighbouring weights of that type"
        _once(found.not_seen, f"updates of {counted(len(unseen), 'tensor')} ({few(unseen)}): {why}")
    else:
        why = "the sums do not tell all their elements"
        _once(found.not_seen, f"{kind} of {counted(len(unseen), 'tensor')} ({few(unseen)}): {why}")


def _once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)
