"""Chapter 02, collectives written by hand: exercises 02.1 to 02.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.check.exercise import Data, Exercise, Mistake, random
from lib.check.listen import Heard, listen
from lib.mesh import Group

# ---- what ranks send ------------------------------------------------------------------------------------------------

AS_ASKED = "only what is needed, by send and receive"
COLLECTIVE = "a collective"
ELSEWHERE = "a message to another rank than asked"
MORE = "more bytes than needed"
UNCHANGED, CHANGED = "as before", "changed"


def _sends(heard: Heard, to: tuple[int, ...], most_bytes: int) -> str:
    """What was sent in words."""
    if heard.collectives:
        return COLLECTIVE
    if any(rank not in to for rank, _ in heard.sent):
        return ELSEWHERE
    return MORE if sum(n_bytes for _, n_bytes in heard.sent) > most_bytes else AS_ASKED


def _messages(to: Callable[[Group], tuple[int, ...]], most: Callable[[int, int], float]) -> Callable:
    """A body: the answer on this rank's x, what became of x, and whether it sent to `to` and at most `most(S, n)`."""

    def body(answer: Callable, group: Group, given: Data) -> Data:
        x = given["x"].clone()
        heard = listen()
        result = answer(x, group)
        limit = round(most(x.numel() * x.element_size(), group.size))
        kept = UNCHANGED if torch.equal(x, given["x"]) else CHANGED
        return {"result": result, "x afterwards": kept, "what was sent": _sends(heard, to(group), limit)}

    return body


def _right(group: Group) -> tuple[int, ...]:
    return ((group.rank + 1) % group.size,)


def _left(group: Group) -> tuple[int, ...]:
    return ((group.rank - 1) % group.size,)


def _all(group: Group) -> tuple[int, ...]:
    return group.ranks


def _result(of: Callable[[list[Tensor], int], Tensor], sent: str = "") -> Callable:
    """What ranks return when rank r's result is `of(everybody's x, r)`; with `sent`, also what was sent."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        xs = [g["x"] for g in given]
        return [{"result": of(xs, r)} | ({"what was sent": sent} if sent else {}) for r in range(len(xs))]

    return answers


def _reference(of: Callable[[list[Tensor], int], Tensor]) -> Callable:
    right = _result(of, AS_ASKED)
    return lambda given: [data | {"x afterwards": UNCHANGED} for data in right(given)]


def _as_sent(sent: str) -> Callable:
    """The right numbers, sent in another way."""
    return lambda given, want: [{"result": w["result"], "what was sent": sent} for w in want]


_OVERWRITTEN = Mistake(
    "The result is right, but x has changed. Whoever called you may still need it: work on a copy (x.clone()), or add "
    "into what you received.",
    lambda given, want: [{"result": w["result"], "x afterwards": CHANGED} for w in want],
)


def _chunk(x: Tensor, i: int, n: int) -> Tensor:
    return x.chunk(n)[i % n]


# ---- 02.1 shift -----------------------------------------------------------------------------------------------------


def _shift_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"x": random(generator, 3), "shifts": [1, -1, 2, n, 1 - n]} for _ in range(n)]


def _shift(answer: Callable, group: Group, given: Data) -> Data:
    return {f"shift(x, {k}, group)": answer(given["x"].clone(), k, group) for k in given["shifts"]}


def _shifted(source: Callable[[int, int, int], int]) -> Callable:
    """Each rank has what rank source(its own, k, n) had."""
    return lambda given, want=None: [
        {f"shift(x, {k}, group)": given[source(r, k, len(given)) % len(given)]["x"] for k in g["shifts"]}
        for r, g in enumerate(given)
    ]


SHIFT = Exercise(
    id="02.1",
    title="shift",
    points=2,
    body=_shift,
    inputs=_shift_inputs,
    reference=_shifted(lambda r, k, n: r - k),
    mistakes=(
        Mistake(
            "You turned the other way round: rank r sends to rank r + k, so it receives from rank r - k.",
            _shifted(lambda r, k, n: r + k),
        ),
        Mistake(
            "Each rank still has its own x. Return what was received: recv and exchange give it back from wait().",
            _shifted(lambda r, k, n: r),
        ),
        Mistake("You always pass to the next rank, whatever k is.", _shifted(lambda r, k, n: r - 1)),
        Mistake(
            "Two mistakes: the direction is the wrong one, and k plays no part.",
            _shifted(lambda r, k, n: r + 1),
        ),
    ),
)

# ---- 02.2 ring_reduce_scatter ---------------------------------------------------------------------------------------


def _array_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"x": random(generator, 5 * n)} for _ in range(n)]


def _part_of_sum(xs: list[Tensor], r: int) -> Tensor:
    return _chunk(torch.stack(xs).sum(0), r, len(xs))


SCATTER = Exercise(
    id="02.2",
    title="ring_reduce_scatter",
    points=3,
    body=_messages(_right, lambda size, n: (n - 1) / n * size),
    inputs=_array_inputs,
    reference=_reference(_part_of_sum),
    mistakes=(
        Mistake(
            "The sum is complete, but each rank has the chunk after its own. Let the chunks start one place earlier: "
            "in step k, rank r sends chunk r - 1 - k.",
            _result(lambda xs, r: _part_of_sum(xs, (r + 1) % len(xs))),
        ),
        Mistake(
            "Your chunk has the numbers of two ranks only. What you pass on must be the sum so far, not your own "
            "chunk.",
            _result(lambda xs, r: _chunk(xs[r - 1] + xs[r], r, len(xs))),
        ),
        Mistake(
            "That is your own chunk, as it came in. Nothing was added.",
            _result(lambda xs, r: _chunk(xs[r], r, len(xs))),
        ),
        Mistake(
            "That is the whole sum. A reduce-scatter leaves each rank with its own chunk of it.",
            _result(lambda xs, r: torch.stack(xs).sum(0)),
        ),
        Mistake(
            "One rank's numbers are missing, and it is the chunk after yours: the ring needs n - 1 steps.",
            _result(lambda xs, r: _part_of_sum(xs, r + 1) - _chunk(xs[(r + 1) % len(xs)], r + 1, len(xs))),
        ),
        Mistake(
            "The result is right, but a collective did the work. Write it from send, recv and exchange.",
            _as_sent(COLLECTIVE),
        ),
        Mistake(
            "The result is right, but somebody sends to a rank that is not its right neighbour.",
            _as_sent(ELSEWHERE),
        ),
        Mistake(
            "The result is right, but you send more than (n-1)/n of the array. One chunk in each step is enough.",
            _as_sent(MORE),
        ),
        _OVERWRITTEN,
    ),
)

# ---- 02.3 left_all_gather -------------------------------------------------------------------------------------------


def _part_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"x": random(generator, 3)} for _ in range(n)]


def _in_order(order: Callable[[int, int], list[int]]) -> Callable:
    return lambda xs, r: torch.cat([xs[i % len(xs)] for i in order(r, len(xs))])


GATHER = Exercise(
    id="02.3",
    title="left_all_gather",
    points=3,
    body=_messages(_left, lambda size, n: (n - 1) * size),
    inputs=_part_inputs,
    reference=_reference(_in_order(lambda r, n: list(range(n)))),
    mistakes=(
        Mistake(
            "The result is right, but your ring turns to the right. Send to rank r - 1, and receive from rank r + 1.",
            _as_sent(ELSEWHERE),
        ),
        Mistake(
            "All parts are there, in the order in which they came: your own one first. Put the part of rank i in place "
            "i, on all ranks.",
            _result(_in_order(lambda r, n: [r + i for i in range(n)])),
        ),
        Mistake(
            "The parts are in the wrong order. In a ring that turns left the second part is that of rank r + 1, the "
            "third that of r + 2.",
            _result(_in_order(lambda r, n: [2 * r - i for i in range(n)])),
        ),
        Mistake(
            "Only the right neighbour's part arrives, again and again: you send your own part in every step. Pass on "
            "what you received last.",
            _result(_in_order(lambda r, n: [r if i == r else r + 1 for i in range(n)])),
        ),
        Mistake(
            "The result is right, but a collective did the work. Write it from send, recv and exchange.",
            _as_sent(COLLECTIVE),
        ),
        Mistake(
            "The result is right, but you send more than n - 1 parts: one in each of n - 1 steps is enough.",
            _as_sent(MORE),
        ),
    ),
)

# ---- 02.4 all_to_all ------------------------------------------------------------------------------------------------


def _gathered(chunk: Callable[[int, int], int]) -> Callable:
    """From each rank j, its chunk number chunk(j, r)."""
    return lambda xs, r: torch.cat([_chunk(x, chunk(j, r), len(xs)) for j, x in enumerate(xs)])


ALL_TO_ALL = Exercise(
    id="02.4",
    title="all_to_all",
    points=2,
    body=_messages(_all, lambda size, n: (n - 1) / n * size),
    inputs=_array_inputs,
    reference=_reference(_gathered(lambda j, r: r)),
    mistakes=(
        Mistake(
            "Every rank sends the same chunk, its own one, to all others: that is an all-gather. Send chunk j to rank "
            "j.",
            _result(_gathered(lambda j, r: j)),
        ),
        Mistake(
            "That is x, as it came in. The result holds chunk r of every rank.",
            _result(lambda xs, r: xs[r]),
        ),
        Mistake(
            "The chunks of the others are right; in your own place there are zeros. A rank keeps chunk r of its own.",
            _result(
                lambda xs, r: torch.cat(
                    [_chunk(x, r, len(xs)) if j != r else 0 * _chunk(x, r, len(xs)) for j, x in enumerate(xs)]
                )
            ),
        ),
        Mistake(
            "Your own chunk is missing: what is put together has only those of the others.",
            _result(lambda xs, r: torch.cat([_chunk(x, r, len(xs)) for j, x in enumerate(xs) if j != r])),
        ),
        Mistake(
            "All chunks are there, but your own comes first. Put what rank j sent in place j.",
            _result(
                lambda xs, r: torch.cat([_chunk(xs[j], r, len(xs)) for j in sorted(range(len(xs)), key=r.__ne__)])
            ),
        ),
        Mistake(
            "The result is right, but a collective did the work. Write it from send, recv and exchange.",
            _as_sent(COLLECTIVE),
        ),
        Mistake(
            "The result is right, but you send more than needed: each rank gets one chunk, not the array.",
            _as_sent(MORE),
        ),
    ),
)

EXERCISES = (SHIFT, SCATTER, GATHER, ALL_TO_ALL)
