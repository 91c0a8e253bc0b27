"""08.3: three pipelines with two actions in the wrong order: one is slow, one hangs, one is silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, kind, several
from lib.mesh import Group

RIGHT = {"A": (1, "1B2", 4), "B": (2, "2B0", None), "C": (2, "2F2", 0)}
WHATS = RANK, ACTION, LOST = "rank", "action", "units lost"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for name, row in zip(RIGHT, several(result, len(RIGHT)), strict=True):
        if not isinstance(row, (tuple, list)) or len(row) != len(WHATS):
            found[f"{name}: {RANK}"] = kind(row)
            continue
        rank, action, lost = row
        action = str(action).strip().upper()
        lost = "None: it never ends" if lost is None else lost
        found |= {f"{name}: {what}": x for what, x in zip(WHATS, (rank, action, lost), strict=True)}
    return found


def answer() -> list[tuple[Any, ...]]:
    return [*RIGHT.values()]


def in_floats() -> tuple[list[Any], ...]:
    return tuple([float(rank), action.lower(), lost] for rank, action, lost in RIGHT.values())


def mistake(name: str, what: str, value: Any, hint: str) -> Mistake:
    row = [value if what == at else right for at, right in zip(WHATS, RIGHT[name], strict=True)]
    return Mistake(f"Pipeline {name}: {hint}", lambda: [*(RIGHT | {name: row}).values()], about=(f"{name}: {what}",))


EXERCISE = Exercise(
    id="08.3",
    title="at_fault",
    points=2,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(answer, in_floats),
    mistakes=(
        mistake(
            "A",
            RANK,
            0,
            "rank 0 has the longest gap before its second backward, because it waits for the gradient that rank 1 "
            "sends late. Look for a rank that could continue.",
        ),
        mistake(
            "A",
            RANK,
            2,
            "rank 2 runs its backwards without a pause, one after each gradient of rank 3. The rank that reads its "
            "gradients waits, although a gradient arrived.",
        ),
        mistake(
            "A", RANK, 3, "rank 3 runs without a pause, as in GPipe. The first gap that GPipe does not have is later."
        ),
        mistake(
            "A",
            ACTION,
            "1B1",
            "1B1 is late because a different action is in its place. Name the action that comes too early.",
        ),
        mistake(
            "A",
            ACTION,
            "1B3",
            "for 1B3 rank 1 would wait for two more backwards of rank 2, 4 units. It waits 2.",
        ),
        mistake(
            "A",
            LOST,
            2,
            "rank 1 waits 2 units, and then computes 2 more before the action that rank 0 waits for. Compare the step "
            "with (m + p - 1)(T_F + T_B).",
        ),
        mistake(
            "A",
            LOST,
            16,
            "all four ranks lose the same 4 units at the same time. Count the step, not its sum over ranks.",
        ),
        mistake(
            "A", LOST, 25, "that is the whole step. GPipe takes (m + p - 1)(T_F + T_B) units; name the difference."
        ),
        mistake(
            "B",
            RANK,
            3,
            "rank 3 waits in a forward: GPipe runs all forwards first, so it is in order. The rank that should send to "
            "it already waits for a gradient.",
        ),
        *(
            mistake(
                "B",
                RANK,
                rank,
                f"rank {rank} has run its forwards and waits for its first gradient, as in GPipe. Its gradient comes "
                "from a rank that also waits: follow these waits to the cycle.",
            )
            for rank in (0, 1)
        ),
        mistake(
            "B",
            ACTION,
            "2F3",
            "2F3 is the action that is missing. Name the action that rank 2 runs in its place: the line says which "
            "function it waits in, and the shape says for which microbatch.",
        ),
        *(
            mistake(
                "B",
                ACTION,
                f"2B{m}",
                "the shape names the microbatch. Microbatch 0 has 4 sequences, microbatch 3 has one.",
            )
            for m in (1, 2, 3)
        ),
        mistake("B", LOST, 0, "no action follows a deadlock: the step never ends. Return None for its units."),
        *(
            mistake(
                "C",
                RANK,
                rank,
                f"the gradients of rank {rank} are wrong, but it may only pass on a wrong gradient that it received. "
                "Gradients travel from the last rank to the first: where does the error begin?",
            )
            for rank in (0, 1)
        ),
        mistake(
            "C", RANK, 3, "the gradients and losses of rank 3 are right. It got the right activations, in order."
        ),
        mistake(
            "C",
            ACTION,
            "2F1",
            "2F1 comes too late; an action has taken its place and its message. Name the action that comes too early.",
        ),
        *(
            mistake(
                "C",
                ACTION,
                f"2B{m}",
                "the printed order of backwards is right on every rank. The graphs that they use have the wrong "
                "numbers, and graphs are made in forward.",
            )
            for m in (1, 2)
        ),
        *(
            mistake(
                "C",
                LOST,
                lost,
                "its messages have no number. Rank 2 takes the next one that arrives, computes as long as ever, and "
                "passes it on in the same place: no rank waits.",
            )
            for lost in (1, 2, 4, None)
        ),
    ),
)
