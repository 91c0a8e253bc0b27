"""The catalogue: what may be wrong with a practice run, where, and what would show it.

A place is an axis (`dp`), a coordinate on an axis (`dp 1`, `pp 0`), a rank (`rank 2`), or a kind of parameter
(`norms`). It does not depend on the layout: where a layout has no such place, the run is healthy.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from lib.layout import AXES, Layout

KINDS = ("embedding", "norms", "attention", "mlp", "head")  # of parameters
NUMBERS, COSTS = "numbers", "time or bytes"

Places = Callable[[Layout, float], list[str]]  # of a layout and a probability of dropout


@dataclass(frozen=True)
class Cause:
    """One cause of sickness.

    Args:
        name: as a reader writes it.
        group: whether it makes numbers wrong, or only costs time or bytes.
        says: the cause in a sentence.
        where: how its place is written.
        shows: what a report of a run with it shows, for one who named it wrongly.
        look: the part of the report that tells, for one who overlooked it.
        places: the places that it may have.
    """

    name: str
    group: str
    says: str
    where: str
    shows: str
    look: str
    places: Places


def kind_of_parameter(name: str) -> str:
    """The kind of a parameter, by its name in the serial model."""
    part = next((kind for kind in ("attention", "mlp") if kind in name), name.partition(".")[0])
    return "norms" if "norm" in name else "embedding" if part == "embed" else part


def _long(layout: Layout, *axes: str) -> list[str]:
    """The axes with more than one rank."""
    return [axis for axis in axes or AXES if getattr(layout, axis) > 1]


def _ranks(layout: Layout, dropout: float) -> list[str]:
    return [f"rank {rank}" for rank in range(layout.num_ranks)] if layout.num_ranks > 1 else []


def _along(axis: str, needs: str = "") -> Places:
    """All coordinates on an axis, in layouts where a number is above one."""

    def places(layout: Layout, dropout: float) -> list[str]:
        return [f"{axis} {i}" for i in range(getattr(layout, axis))] if getattr(layout, needs or axis) > 1 else []

    return places


def _catalogue() -> Iterator[Cause]:
    axis, rank, stage = "an axis: dp, pp or tp", "a rank, such as `rank 2`", "a coordinate on pp, such as `pp 1`"
    yield Cause(
        "own-count",
        NUMBERS,
        "The loss of each part of the batch is divided by the tokens of that part instead of the tokens of all parts.",
        "what the batch is divided over: dp or microbatches",
        "the loss, and the gradients of all kinds, larger by the same whole factor",
        "the loss of step 1, and the size of gradients against one process",
        lambda layout, dropout: _long(layout, "dp") + ["microbatches"] * (layout.microbatches > 1),
    )
    yield Cause(
        "norm-copies",
        NUMBERS,
        "The norm for clipping counts elements that several ranks along an axis hold once for each rank.",
        "an axis: dp or tp",
        "right gradients, and a norm for clipping that is not their norm",
        "the norm that clips, against the norm of the gradients that the ranks hold",
        lambda layout, dropout: _long(layout, "dp", "tp"),
    )
    yield Cause(
        "missing-sum",
        NUMBERS,
        "The gradients of one kind of parameter are not summed over dp.",
        f"a kind: {', '.join(KINDS)}",
        "wrong gradients of one kind of parameter only, and fewer bytes on dp than planned",
        "gradients by kind of parameter, and messages that the plan has and the run has not",
        lambda layout, dropout: [*KINDS] if layout.dp > 1 else [],
    )
    yield Cause(
        "extra-sum",
        NUMBERS,
        "The gradients of the norms are summed once more over the ranks of an axis, which all have the full gradient.",
        "an axis: dp or tp",
        "gradients of norms too large by a whole factor, and messages that the plan does not have",
        "gradients by kind of parameter, and messages that the plan does not have",
        lambda layout, dropout: _long(layout, "dp", "tp"),
    )
    yield Cause(
        "early-read",
        NUMBERS,
        "On one pipeline stage, gradients are used before their sum over dp has arrived.",
        stage,
        "gradients that differ between replicas, of all kinds on a stage, although all bytes are sent",
        "which ranks wait for their gradient sums before the optimizer",
        _along("pp", needs="dp"),
    )
    yield Cause(
        "other-start",
        NUMBERS,
        "One rank starts with different weights.",
        rank,
        "weights before step 1 that are not the weights of one process",
        "weights before step 1, by rank",
        _ranks,
    )
    yield Cause(
        "same-samples",
        NUMBERS,
        "One replica reads the sequences of a different replica.",
        "a coordinate on dp, such as `dp 1`",
        "the same sequences on two replicas",
        "the sequences that each replica read",
        _along("dp"),
    )
    yield Cause(
        "same-masks",
        NUMBERS,
        "Ranks along an axis drop the same elements, where one process drops different elements for each.",
        "an axis: dp or tp",
        "a loss and gradients that are a little off for all kinds of parameters, and right without dropout",
        "gradients that are off by some per cent everywhere; what changes them is an option of the run",
        lambda layout, dropout: _long(layout, "dp", "tp") if dropout else [],
    )
    yield Cause(
        "lost-microbatches",
        NUMBERS,
        "One pipeline stage clears its gradients before each microbatch, so only the last microbatch counts.",
        stage,
        "wrong gradients on the ranks of one stage, equal on all replicas, and right with one microbatch",
        "gradients by rank, and whether the copies agree",
        _along("pp", needs="microbatches"),
    )
    yield Cause(
        "skipped-step",
        NUMBERS,
        "The optimizer of one rank does not change its parameters.",
        rank,
        "right gradients, and no update on one rank",
        "the update of step 1, by rank",
        _ranks,
    )
    yield Cause(
        "wide-messages",
        COSTS,
        "All messages along an axis travel in a dtype of twice the bytes.",
        axis,
        "as many calls as planned along an axis, with twice the bytes",
        "calls and bytes against the plan",
        lambda layout, dropout: _long(layout),
    )
    yield Cause(
        "sent-twice",
        COSTS,
        "Every message along an axis is sent twice.",
        axis,
        "twice the calls along an axis, and twice the bytes",
        "calls and bytes against the plan",
        lambda layout, dropout: _long(layout),
    )
    yield Cause(
        "slow-rank",
        COSTS,
        "One rank computes several times slower than the others.",
        rank,
        "one rank that is busy much longer than the others, which wait for it",
        "how long each rank is busy, and for whom the others wait",
        _ranks,
    )
    yield Cause(
        "slow-link",
        COSTS,
        "The links along one axis have a small fraction of their bandwidth.",
        axis,
        "messages along one axis that take many times their planned time, with planned calls and bytes",
        "each link measured alone, and waiting on the link",
        lambda layout, dropout: _long(layout),
    )


CAUSES = {cause.name: cause for cause in _catalogue()}


def place_text(written: object) -> str:
    """A place in the form of this file: `DP=1` and `dp1` become `dp 1`, `2` becomes `rank 2`."""
    words = re.findall(r"[a-z]+|\d+", str(written).lower())
    return " ".join(["rank", *words] if words and words[0].isdigit() else words)


def causes_text() -> str:
    """All causes, for a reader."""
    lines = []
    for group in (NUMBERS, COSTS):
        lines.append(f"What makes {NUMBERS} wrong:" if group == NUMBERS else f"What costs {COSTS}:")
        for cause in CAUSES.values():
            if cause.group == group:
                said = textwrap.wrap(cause.says, 78) + [f"Place: {cause.where}."]
                lines += [f"  {name:18} {line}" for name, line in zip_longest([cause.name], said, fillvalue="")]
    return "\n".join(lines)
