"""Which tensors, on which ranks, by which factor: the pattern of a mistake in gradients, clipped gradients or updates.

Each function knows one pattern, and returns its cause and a sentence, or nothing. They are asked in order, the most
certain first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lib.doctor.numbers.share import Share, Sides
from lib.runtime.hang import named_ranks
from lib.runtime.words import counted, few

Said = tuple[str, str]  # cause, sentence

SAME_FACTOR = 0.02  # factors that differ by less are one
SHARE_OF_ONE = 0.03  # what noise of a narrow type leaves: a share near 1, and little else
LOSS_SCALE = 256  # factors of two from here on are no axis


@dataclass
class Pattern:
    """The shares of one link of a step.

    Attributes:
        sick: shares that differ.
        order: names of all tensors that were compared, in the order of the model.
        bad: those of `order` with a sick share.
        sizes: axis → size, of axes with several ranks.
    """

    sides: Sides
    kind: str
    shares: list[Share]

    def __post_init__(self) -> None:
        self.sick = [share for share in self.shares if share.is_sick]
        compared = {share.name for share in self.shares}
        self.order = [name for name in self.sides.right.names(self.kind) if name in compared]
        wrong = {share.name for share in self.sick}
        self.bad = [name for name in self.order if name in wrong]
        axes = self.sides.ours.run.ranks[0].axes
        self.sizes = {axis: size for axis, (_, size) in axes.items() if size > 1}

    @property
    def is_all(self) -> bool:
        """Whether each tensor is wrong."""
        return len(self.bad) == len(self.order)

    @property
    def who(self) -> str:
        """The wrong tensors in words."""
        if self.is_all:
            return "all tensors"
        return f"{len(self.bad)} of {counted(len(self.order), 'tensor')} ({few(self.bad)})"


def said_of(pattern: Pattern) -> list[Said]:
    """Cause and sentence for each difference; empty if nothing does."""
    found = list(_missing(pattern))
    if not pattern.sick:
        return found
    for rule in RULES:
        if said := rule(pattern):
            return [*found, said]
    return [*found, _some(pattern)]


def _missing(pattern: Pattern) -> Iterator[Said]:
    """Tensors that only one of the two runs has."""
    ours, right = pattern.sides.ours, pattern.sides.right
    here = {(held.rank, held.name) for held in ours.held(pattern.kind)}
    there = {held.name for held in right.held(pattern.kind) if held.part.square > 0}
    without: dict[str, list[int]] = {}
    for held in ours.held("weights"):
        if held.name in there and (held.rank, held.name) not in here and held.part.region.numel:
            without.setdefault(held.name, []).append(held.rank)
    if without:
        name, ranks = next(iter(without.items()))
        yield (
            "no gradient",
            f"{counted(len(without), 'tensor')} without a gradient, such as {name} on {named_ranks(sorted(ranks))}, "
            "where one process has one: frozen, unused, or cut off by a detach",
        )
    known = {held.name for held in right.held(pattern.kind)}
    odd = [held.name for held in ours.held(pattern.kind) if held.name not in known and held.part.square > 0]
    if odd:
        yield (
            "no gradient",
            f"{counted(len({*odd}), 'tensor')} with a gradient, such as {odd[0]}, where one process has none: frozen "
            "there, or unused",
        )


def _not_finite(pattern: Pattern) -> Said | None:
    wild = [share for share in pattern.sick if not share.is_finite]
    if not wild:
        return None
    ranks = sorted({share.rank for share in wild})
    return "not finite", f"{wild[0].own_name} has infinite values or NaN on {named_ranks(ranks)}"


def _untied(pattern: Pattern) -> Said | None:
    """One tensor in one process, two here, each with a part of its gradient."""
    if len(pattern.bad) != 1:
        return None
    [name] = pattern.bad
    own_names = sorted({share.own_name for share in pattern.shares if share.name == name})
    if len(own_names) == 1:
        return None
    pair = " and ".join(own_names)
    return "untied", f"{pair} are one tensor in one process, and here two: each has its own terms of the gradient"


def _own_factor_of_each_rank(pattern: Pattern) -> Said | None:
    """Each rank multiplied all that it has by a different number."""
    factors: dict[int, list[float]] = {}
    for share in pattern.sick:
        factors.setdefault(share.rank, []).append(share.share)
    if not pattern.is_all or not _is_factor(pattern.sick):
        return None
    if any(_spread(of) > SAME_FACTOR for of in factors.values()):
        return None
    means = [sum(of) / len(of) for _, of in sorted(factors.items())]
    if _spread(means) <= SAME_FACTOR:
        return None
    listed = ", ".join(f"{factor:.4g}" for factor in means[:8]) + ", …" * (len(means) > 8)
    text = f"all tensors: each rank has a different factor ({listed})"
    if pattern.kind == "gradients":
        return "one factor", f"{text}: ranks divide by different numbers, or only some do"
    if pattern.kind == "clipped":
        return "local norm", f"{text}: each took a different norm"
    return "learning rate", f"{text}: learning rates that differ"


def _copies(pattern: Pattern) -> Said | None:
    """Ranks that hold the same have different bits."""
    differ = [share for share in pattern.sick if share.copies_differ]
    if not differ:
        return None
    axis = sorted({axis for share in differ for axis in share.copies_differ})[0]
    apart = {share.name for share in differ if axis in share.copies_differ}
    held = {share.name for share in pattern.shares if axis in share.copies}
    shared = f"the {counted(len(held), 'tensor')} that they share"
    text = f"ranks that hold the same disagree along {axis}, in {len(apart)} of {shared}"
    if pattern.kind != "gradients":
        return "copies step apart", f"{text}: before the clip they agreed, so they clip or step differently"
    full = {share.name for share in pattern.shares if len(share.copies) == len(pattern.sizes)}
    if len(pattern.sizes) > 1 and full and not apart & full and apart < held:
        return "wrong axis", f"{text}, all of them cut along another axis: they were summed along the wrong one"
    if others := set(pattern.bad) - held:
        last = pattern.bad[-1]
        return (
            "missing sum inside",
            f"{text}, and {len(others)} that are cut along it are wrong as well, up to {last}: the layer after it "
            "lacks a sum in backward, as a column-parallel layer does without its f",
        )
    which = "all" if apart == held else few(sorted(apart))
    return "missing sum", f"{text}; the sum along {axis} is missing in {which}{_adds_up(pattern, axis, apart)}"


def _adds_up(pattern: Pattern, axis: str, names: set[str]) -> str:
    """Whether the shares of the ranks along an axis add up to the right gradient, in words."""
    name = next(name for name in pattern.order if name in names)
    groups: dict[tuple, dict[int, float]] = {}
    for share in pattern.shares:
        if share.name == name:
            where = dict(pattern.sides.ours.run.ranks[share.rank].axes)
            index, _ = where.pop(axis)
            groups.setdefault(tuple(where.items()), {})[index] = share.share
    found = list(next(iter(groups.values())).values())
    for total, words in ((sum(found), "add up to 1"), (sum(found) / len(found), "have a mean of 1")):
        if len(found) > 1 and abs(total - 1) < SAME_FACTOR:
            return f" (the shares of {name} {words}: each rank has its own terms)"
    return ""


def _one_factor(pattern: Pattern) -> Said | None:
    """All wrong tensors are the right ones times one number."""
    factors = [share.share for share in pattern.sick]
    if not _is_factor(pattern.sick) or _spread(factors) > SAME_FACTOR * max(map(abs, factors)):
        return None
    factor = factors[0]
    if abs(factor) < SAME_FACTOR:
        return _nothing(pattern)
    text = f"{pattern.who}: one factor, {factor:.4g}{_named(factor, pattern.sizes)}"
    if not pattern.is_all:
        return "counted twice", f"{text}: a sum too many or too few, in tensors that two parts of a program sum"
    if pattern.kind == "clipped":
        return "clip", f"{text}: the clip"
    if pattern.kind == "updates":
        return "learning rate", f"{text}: the learning rate"
    return (
        "one factor",
        f"{text}: a sum where there should be a mean, microbatches that are not divided, a wrong count",
    )


def _nothing(pattern: Pattern) -> Said:
    """All wrong tensors are zero here."""
    if pattern.kind == "updates":
        return (
            "not in the optimizer",
            f"{pattern.who}: not moved, though they have gradients: the optimizer steps other tensors, as one that "
            "was made before the model was cut",
        )
    return "no gradient", f"{pattern.who}: a gradient of zero: cut off by a detach, or frozen"


def _is_factor(sick: list[Share]) -> bool:
    """Whether a factor explains each of them, except for rounding."""
    for share in sick:
        if math.isnan(share.share):
            return False
        if share.rest > max(2 * share.allowed * max(1.0, abs(share.share)), 0.2 * abs(share.share - 1)):
            return False
    return True


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def _named(factor: float, sizes: dict[str, int]) -> str:
    """What a factor may be: the size of an axis, its inverse, a number of microbatches, the scale of a loss."""
    names = [f"the size of {axis}" for axis, size in sizes.items() if abs(factor / size - 1) < SAME_FACTOR]
    names += [f"1 / the size of {axis}" for axis, size in sizes.items() if abs(factor * size - 1) < SAME_FACTOR]
    power = round(math.log2(factor)) if factor > 0 else 0
    if abs(factor) >= LOSS_SCALE and abs(factor / 2.0**power - 1) < 1e-3:
        names.append("the scale of the loss in float16: record after unscale_")
    elif abs(factor) > 1.5 and abs(factor - round(factor)) < SAME_FACTOR:
        names.append("the number of microbatches")
    return f" ({' or '.join(names)})" if names else ""


def _narrow_sums(pattern: Pattern) -> Said | None:
    """All shares near 1, and a little noise."""
    near = all(abs(share.share - 1) < SHARE_OF_ONE and share.rest < SHARE_OF_ONE for share in pattern.sick)
    if not near or len(pattern.bad) < 0.8 * len(pattern.order):
        return None
    text = "shares of 1, and noise: sums in a narrower type, or a constant such as eps that differs"
    return "narrow sums", f"{pattern.who}: {text}"


def _another_clip(pattern: Pattern) -> Said | None:
    were_compared = pattern.sides.ours.held("gradients") and pattern.sides.right.held("gradients")
    if pattern.kind != "clipped" or not were_compared:
        return None
    return (
        "clip",
        f"{pattern.who}, no common factor, and before the clip they were right: a clip by value, or by parts",
    )


def _another_optimizer(pattern: Pattern) -> Said | None:
    if pattern.kind != "updates":
        return None
    return (
        "optimizer state",
        f"{pattern.who}, no common factor, and the gradients were right: moments or a count of steps that began at "
        "zero, or a matrix that the optimizer needs whole",
    )


def _all_without_a_factor(pattern: Pattern) -> Said | None:
    if not pattern.is_all:
        return None
    if pattern.sides.step:
        return (
            "stale gradients",
            "all tensors, no common factor, and step 1 was right: gradients of the step before were not cleared, or "
            "the data or random numbers of this step differ",
        )
    return (
        "wrong terms",
        "all tensors, no common factor, and copies agree: the sums are right, but not their terms: a rank's own count "
        "of tokens, dropout, different inputs",
    )


def _up_to_a_layer(pattern: Pattern) -> Said | None:
    """Everything before a layer is wrong, and nothing after it."""
    if len(pattern.bad) < 2 or pattern.bad != pattern.order[: len(pattern.bad)]:
        return None
    return (
        "missing sum inside",
        f"everything up to {pattern.bad[-1]}, and nothing after it: the next layer lacks a sum in backward, or "
        "changes the gradient that passes through",
    )


RULES: list[Callable[[Pattern], Said | None]] = [
    _not_finite,
    _untied,
    _own_factor_of_each_rank,
    _copies,
    _one_factor,
    _narrow_sums,
    _another_clip,
    _another_optimizer,
    _all_without_a_factor,
    _up_to_a_layer,
]


def _some(pattern: Pattern) -> Said:
    """Some tensors, and no other pattern: say which, and which of their rows."""
    return "some rows", f"{pattern.who}: look where these are used: a mask, a tie, a bias{_rows_of(pattern)}"


def _rows_of(pattern: Pattern) -> str:
    """Which rows of the first wrong matrix differ, if few do."""
    name, sides = pattern.bad[0], pattern.sides
    shape = next(held.part.region.shape for held in sides.ours.held(pattern.kind) if held.name == name)
    if len(shape) < 2 or not sides.ours.run.whole:
        return ""
    apart = sides.ours.vectors(pattern.kind)[name] - sides.right.vectors(pattern.kind)[name]
    off = torch.linalg.vector_norm(apart.view(shape[0], -1), dim=1)
    rows = (off > 0.1 * off.max()).nonzero().flatten().tolist()
    if len(rows) >= 0.5 * shape[0]:
        return ""
    listed = ", ".join(map(str, rows[:6])) + ", …" * (len(rows) > 6)
    return f"; of {name} only rows {listed} of {shape[0]} differ"
