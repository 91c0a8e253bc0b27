"""What the environment of a rank of `run` says: which rank it is, in torchrun's variables, and that `run` started it.

The problem: a function reads RANK, LOCAL_RANK and WORLD_SIZE, as under torchrun. But a program that a rank starts
inherits them: it would believe that torchrun started it, and wait for ranks that never come.
The idea: a mark beside them, and no address of a store. With both, `lib.torchrun` knows that they are not torchrun's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

MARK = "RANK_IS_OF_RUN"
_OF_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}

is_here = False  # whether this process is a rank of `run`; a program that a rank starts is none


def told_to_rank(environment: Mapping[str, str], rank: int, world_size: int) -> dict[str, str]:
    """The environment of a rank: that of the caller, without what torchrun may have told the caller of itself."""
    kept = {name: value for name, value in environment.items() if name not in _OF_TORCHRUN}
    kept = {name: value for name, value in kept.items() if not name.startswith("TORCHELASTIC_")}
    return kept | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), MARK: "1"}


def says_so() -> bool:
    """Whether RANK and WORLD_SIZE in the environment are those of `run`; with an address they are torchrun's."""
    return MARK in os.environ and not os.environ.get("MASTER_ADDR")
