"""Where a run is saved, and how often: options of `lib.train`; and what a checkpoint needs to know of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lib.layout import whole_number
from lib.model import GPTConfig


class RunText(Protocol):
    """A dataclass with what a run trains on: a text is the same if its SHA-256 is, and its tokens are."""

    sha256: str
    tokens: str

    def named(self) -> str:
        """The text in a few words."""


class RunSettings(Protocol):
    """A dataclass with the settings of a run: these, and those that determine its losses (`folder.DECISIVE`)."""

    model: GPTConfig
    corpus: RunText
    steps: int


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save.

    Args:
        checkpoint: folder for checkpoints of this run alone, which all machines share; Ctrl-C, SIGTERM, SIGUSR1 and a
            file of the name stop in this folder then save before they end the run.
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
