"""Which tensors, on which ranks, by which factor: the pattern of a mistake in gradients, clipped gradients or updates.

Each function knows one pattern, and returns its cause and a sentence, or nothing. They are asked in order, the most
certain first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lib.doctor.numbers.share import Share
from lib.runtime.hang import named_ranks
from lib.runtime.words import counted, few

Said = tuple[str, str]  # cause, sentence

SAME_FACTOR = 0.02  # factors that differ by less are one
SHARE_OF_ONE = 0.03  # what noise of a narrow type leaves: a share near 1, and little else
LOSS_SCALE = 256  # factors of two from here on are no axis


@dataclass
class Pattern:
    """The shares of one link of a step.

    Args:
        kind: of the tensors: gradients, clipped or updates.
        shares: of all parts that were compared.
        names: of the tensors, in the order of the model.
        axes: of each rank: axis → (index, size).
        step: its number, from 0.
        were_gradients_right: of clipped gradients: whether they were compared before the clip.
        rows_of: function from the name of a wrong tensor to words that say which of its rows differ.

    Attributes:
        sick: shares that differ.
        order: names of all tensors that were compared, in the order of the model.
        bad: those of `order` with a sick share.
        sizes: axis → size, of axes with several ranks.
    """

    kind: str
    shares: list[Share]
    names: Sequence[str]
    axes: Sequence[Mapping[str, tuple[int, int]]]
    step: int = 0
    were_gradients_right: bool = False
    rows_of: Callable[[str], str] = lambda name: ""

    def __post_init__(self) -> None:
        self.sick = [share for share in self.shares if share.is_sick]
        compared = {share.name for share in self.shares}
        self.order = [name for name in self.names if name in compared]
        wrong = {share.name for share in self.sick}
        self.bad = [name for name in self.order if name in wrong]
        self.sizes = {axis: size for axis, (_, size) in self.axes[0].items() if size > 1}

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
    """Cause and sentence of the first pattern that these shares have; empty if none differs."""
    if not pattern.sick:
        return []
    return [next((said for rule in RULES if (said := rule(pattern))), None) or _some(pattern)]


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
            where = dict(pattern.axes[share.rank])
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
    if 0 < factor < 1:
        return "one factor", f"{text}: a mean where there should be a sum, a division too many, a wrong count"
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
    if pattern.kind != "clipped" or not pattern.were_gradients_right:
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
    if pattern.step:
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
    rows = pattern.rows_of(pattern.bad[0])
    return "some rows", f"{pattern.who}: look where these are used: a mask, a tie, a bias{rows}"
