"""Settings of checkpoints; this file does not load the code that writes them."""

from __future__ import annotations

from dataclasses import dataclass

from lib.layout import whole_number


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that is of a different run or model."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint that was complete and is damaged."""


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save.

    Args:
        checkpoint: folder for checkpoints of this run alone, which all machines share; Ctrl-C, SIGTERM and SIGUSR1 then
            save before they end the run.
        checkpoint_every: steps between two checkpoints; the last step is always saved.
        keep: number of newest checkpoints to keep.
        resume: the checkpoint to continue from, under any layout; auto is the newest, or a new run if there is none.

    Raises:
        ValueError: an invalid number.
    """

    checkpoint: str
    checkpoint_every: int = 100
    keep: int = 3
    resume: str | None = None

    def __post_init__(self) -> None:
        whole_number("checkpoint_every", self.checkpoint_every, 1)
        whole_number("keep", self.keep, 1)


def reason(error: Exception) -> str:
    """The message of an error; for an OSError without its number."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
