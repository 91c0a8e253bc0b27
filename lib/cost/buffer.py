"""A tensor of a dry run: it has a size and no values, and its bytes count while something refers to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib.cost.sizes import Weight

# From an output gradient to the input gradient, weights, and the buffer of their gradients.
Backward = Callable[[Any], tuple[Any, list[Weight], "Buffer | None"]]


class Buffer:
    """Bytes of a model, until the last reference to them is gone."""

    def __init__(self, owner: Any, size: int) -> None:
        self.owner, self.size = owner, size
        owner.live += size
        owner.seen()

    def __del__(self) -> None:
        self.owner.live -= self.size
