"""Chapters 08 and 09, a schedule that somebody writes: exercises 08.3 and 09.1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, whole
from lib.check.written import (
    KIND,
    ORDERS,
    SIZES,
    UNLIKE,
    Make,
    lacks,
    made_by,
    misread,
    says,
    size,
    writes,
)
from lib.pipeline.action import Action, Schedule, one_stage_each
from lib.pipeline.gpipe import gpipe, naive
from lib.pipeline.one_f_one_b import in_turns, one_f_one_b
from lib.pipeline.simulate import Costs


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Small ones first, as they are shown when they are wrong."""
    several = [(ranks, whole(generator, *range_)) for ranks, range_ in ((2, (2, 5)), (3, (4, 7)), (4, (6, 10)))]
    half = whole(generator, 2, 5) / 2
    return [{"cases": [*several, (1, 3)], "costs": Costs(1, half, half)}]


# ---- 08.3 gpipe -----------------------------------------------------------------------------------------------------

_NAME = "gpipe"


def _other_way_round(num_ranks: int, num_microbatches: int) -> Schedule:
    right = gpipe(num_ranks, num_microbatches)
    return replace(right, rank_of=right.rank_of[::-1], actions=right.actions[::-1])


def _complains(kind_of: str) -> Callable:
    return says(_NAME, KIND, kind_of)


def _made(make: Make) -> Callable:
    return made_by(_NAME, make)


GPIPE = Exercise(
    id="08.3",
    title=_NAME,
    points=2,
    body=writes(_NAME, gpipe),
    inputs=_cases_inputs,
    reference=_made(gpipe),
    ranks=(1,),
    mistakes=(
        Mistake(
            "A rank lacks a backward. Each stage has weights that want a gradient, so each microbatch goes back "
            "through all of them.",
            _complains(lacks("B")),
        ),
        Mistake(
            "Nothing goes backward: that is an evaluation. Behind its forwards each rank has as many backwards.",
            _made(lambda *case: gpipe(*case).forward_only()),
        ),
        Mistake(
            "That is 1F1B: right, as fast, and it keeps less. GPipe begins to go back only when all microbatches have "
            "gone forward. It is what you are asked to write here; 1F1B is chapter 9.",
            _made(one_f_one_b),
        ),
        Mistake(
            "A microbatch comes back before the next one goes forward. That is right and slow: look how the ranks wait "
            "for each other. Let all go forward first.",
            _made(naive),
        ),
        Mistake(
            "Ranks go back in different orders. Nothing is wrong with any of the orders, but a rank can only go back "
            "with what the rank behind it has done: one and the same order makes nobody wait.",
            says(_NAME, ORDERS, UNLIKE),
        ),
        Mistake(
            "One microbatch is missing. There are M of them, and the last one is number M - 1.",
            _made(lambda ranks, microbatches: gpipe(ranks, microbatches - 1)),
        ),
        Mistake(
            "There is one microbatch too many. There are M of them, and the first one is number 0.",
            _made(lambda ranks, microbatches: gpipe(ranks, microbatches + 1)),
        ),
        Mistake(
            "A backward comes before its own forward. It uses what forward has left behind.",
            _complains("_B_ comes before _F_"),
        ),
        Mistake(
            "The stages are the other way round. Rank 0 has the first one, where the rows come in.",
            _made(_other_way_round),
        ),
        *misread(_NAME),
    ),
)

# ---- 09.1 one_f_one_b -----------------------------------------------------------------------------------------------

_TURNS = "one_f_one_b"


def _turns_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """And some in which there are fewer microbatches than a warm-up would like."""
    (given,) = _cases_inputs(generator, n)
    return [given | {"cases": [*given["cases"], (5, 2), (6, 3)]}]


def _warmed_up(forwards: Callable[[int, int], int]) -> Callable:
    """1F1B with so many forwards first, of the number of ranks and of this rank."""

    def make(num_ranks: int, num_microbatches: int) -> Schedule:
        ranks = range(num_ranks)
        orders = [in_turns(num_microbatches, forwards(num_ranks, rank)) for rank in ranks]
        rows = [[Action(rank, op, m) for op, m in orders[rank]] for rank in ranks]
        return one_stage_each(_TURNS, num_microbatches, rows)

    return made_by(_TURNS, make)


def _not_limited(what: str, value: Callable[[int], Any]) -> Callable:
    """Right, but for a fact, by the number of ranks, where they warm up with P-1 microbatches and there are fewer."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        (right,) = made_by(_TURNS, one_f_one_b)(given)
        for case in given[0]["cases"]:
            title = call(_TURNS, case)
            if case[1] < case[0] - 1:
                right = {name: fact for name, fact in right.items() if not name.startswith(title)}
                right[f"{title}: {what}"] = value(case[0])
        return [right]

    return answers


_NOT_LIMITED = (
    "Where there are few microbatches, the warm-up takes some that do not exist. It ends when there are none left."
)

_NEGATIVE = (
    "'_B-_' is no action; write stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, and microbatch, such as _F_"
)
_TOO_MANY = (
    "One forward too many before the first backward. It is as fast, and each rank keeps one microbatch more than it "
    "must. How long does it take until the first gradient reaches rank r, in forwards and in ranks behind it?"
)

TURNS = Exercise(
    id="09.1",
    title=_TURNS,
    points=3,
    body=writes(_TURNS, one_f_one_b),
    inputs=_turns_inputs,
    reference=made_by(_TURNS, one_f_one_b),
    ranks=(1,),
    mistakes=(
        Mistake(_TOO_MANY, _warmed_up(lambda n, rank: n - rank)),
        Mistake(_TOO_MANY, _warmed_up(lambda n, rank: n - rank if rank < n - 1 else 0)),
        Mistake(
            "One forward too few before the first backward. Nothing hangs, but it is slower: a rank stands still until "
            "the first gradient is there, and then again and again. There is one forward for each rank behind it.",
            _warmed_up(lambda n, rank: max(n - rank - 2, 0)),
        ),
        Mistake(
            "There is no warm-up: each rank turns round after one forward, so all wait for each other's. That is the "
            "naive pipeline.",
            _warmed_up(lambda n, rank: 0),
        ),
        Mistake(
            "Every rank has the warm-up of rank 0. The nearer a rank is to the loss, the sooner the first gradient is "
            "there, and the last rank has it at once.",
            _warmed_up(lambda n, rank: n - 1),
        ),
        Mistake(
            "Twice the forwards before the first backward: that is eager 1F1B, which keeps more so that late messages "
            "cost nothing. What is asked for here is the smallest warm-up that makes nobody wait.",
            _warmed_up(lambda n, rank: 2 * (n - rank - 1)),
        ),
        Mistake(
            "That is GPipe: right and as fast, but each rank keeps all microbatches. Let a rank go back with the first "
            "as soon as it can.",
            made_by(_TURNS, gpipe),
        ),
        Mistake(
            "The warm-up grows with the rank, and ranks wait for each other. It is the first rank that has the longest "
            "way to the loss and back.",
            says(_TURNS, KIND, "ranks wait for each other"),
        ),
        Mistake(_NOT_LIMITED, _not_limited(SIZES, lambda n: size(n, n - 1))),
        Mistake(_NOT_LIMITED, _not_limited(KIND, lambda n: _NEGATIVE)),
        Mistake(
            "Backwards are missing: the cool-down. A rank that was ahead by some forwards is behind by as many "
            "backwards when the forwards are through.",
            says(_TURNS, KIND, lacks("B")),
        ),
        Mistake(
            "A backward comes before its own forward. The last rank has no warm-up, so its first pair begins with the "
            "forward.",
            says(_TURNS, KIND, "_B_ comes before _F_"),
        ),
        *misread(_TURNS),
    ),
)

EXERCISES = (GPIPE, TURNS)
