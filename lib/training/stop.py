"""A run that is asked to stop ends after a whole step, with its report, though it saves nothing.

The problem: Ctrl-C ends each process at a different place, and what they measured is lost. The idea: a signal only
stores a number. Between two steps all ranks take the maximum, and stop after the same step; then each returns its
report, as at its end. With a folder for checkpoints, `lib.checkpoint.saver.Saver` does the same, and saves.
"""

from __future__ import annotations

import torch

from lib import comm
from lib.checkpoint.signals import Requests
from lib.launch import device
from lib.mesh import Group


class Stop(Requests):
    """Requests to stop, on all ranks. A context: inside it, Ctrl-C, SIGTERM and SIGUSR1 are such requests.

    after a step: one all-reduce of a number, 4 bytes.

    Args:
        folder: where the process that started the ranks leaves a file named stop, for rank 0; "" if none did.

    Attributes:
        stopped_by: number of the signal that all ranks stopped for; 0 otherwise.
    """

    def __init__(self, world: Group, folder: str) -> None:
        super().__init__()
        self.world, self.folder, self.stopped_by = world, folder, 0

    def after_step(self) -> bool:
        """Return whether to stop, equal on all ranks."""
        mine = torch.tensor(self.asked(self.world.rank, self.folder), dtype=torch.int32, device=device())
        self.stopped_by = int(comm.all_reduce(mine, self.world, "max"))
        return bool(self.stopped_by)
