"""The simplest check of a run: it compares a rank with one process, in all that is not cut."""

from __future__ import annotations

import torch

from course.museum.room import RunSeen

SINGLE = "loss", "output", "gradient"  # the names that a room's program gives to its numbers


def differs_from_one_process(run: RunSeen) -> str:
    """Which number of rank 0 has the shape that one process gives it, and a different value; or an empty text.

    Raises:
        AttributeError: the room has no run in one process.
        KeyError: the run has none of these numbers.
    """
    ours, right = run.ranks[0], run.alone.ranks[0]
    names = [name for name in SINGLE if name in ours]
    found = {name: (ours[name], right[name]) for name in names}
    for name in ours.get("gradients", {}):
        found[name] = ours["gradients"][name], right["gradients"][name]
    if not found:
        raise KeyError("no loss, output or gradient to compare")
    for name, pair in found.items():
        mine, one = map(torch.as_tensor, pair)
        if mine.shape == one.shape and not torch.allclose(mine, one):
            return f"{name}: one process has a different one"
    return ""
