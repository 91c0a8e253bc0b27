"""What there is to say about checkpoints before there is any; nothing here loads what writes them."""

from __future__ import annotations

from dataclasses import dataclass

from lib.layout import whole_number


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that is of something else."""


@dataclass(frozen=True)
class Checkpoints:
    """Where, and how often.

    Args:
        checkpoint: folder for checkpoints of this run, and of no other; Ctrl-C and SIGTERM then save before they end
            it.
        checkpoint_every: steps between two; the last step is saved in any case.
        keep: so many of the newest checkpoints.
        resume: the checkpoint to go on from, under any layout; auto is the newest, or to begin afresh if there is none.

    Raises:
        ValueError: a number that makes no sense.
    """

    checkpoint: str
    checkpoint_every: int = 100
    keep: int = 3
    resume: str | None = None

    def __post_init__(self) -> None:
        whole_number("checkpoint_every", self.checkpoint_every, 1)
        whole_number("keep", self.keep, 1)
