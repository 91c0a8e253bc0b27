"""When a run saves: every few steps, when it is asked to stop, and at its end; and how it resumes.

The problem: a save takes as long as many steps, and if every rank waits for the disk, the cluster is idle.
The idea: copy the state in memory, and let a thread write it while training continues. Threads that communicate during
training can deadlock, so this thread never does. One all-reduce (max) of two numbers after each step shows the ranks
whether all finished. When no rank is writing, rank 0 gives the checkpoint its name.

A run that is killed loses the steps since the last complete checkpoint: at most `checkpoint_every` and those during
which it was written. A run that is asked to stop, by Ctrl-C, SIGTERM, SIGUSR1 or `touch runs/stop`, saves first. A
signal ends each process at a different place, and ranks that stop after different steps wait for each other forever.
Here a signal only stores a number, which the rank checks between two steps, and all ranks take the maximum.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from lib import comm
from lib.checkpoint import files, folder
from lib.checkpoint.files import CheckpointError
from lib.checkpoint.settings import Checkpoints
from lib.checkpoint.signals import SIGNALS, Requests, on_signals, pass_on, passed_on  # noqa: F401 their old place
from lib.checkpoint.storage import Save, restore
from lib.launch import device
from lib.parallel_model import ParallelModel
from lib.runtime.hang import named_ranks


class Saver(Requests):
    """Saves a run, on all its ranks. A context: inside it, Ctrl-C, SIGTERM and SIGUSR1 are requests to stop.

    after a step: one all-reduce of two numbers, 8 bytes. A save: one all-gather of plans, and two of outcomes.

    Args:
        model: the model, with the pieces of this rank.
        settings: where and how often; the settings of rank 0 count.
        config: settings of the run, for readers.

    Attributes:
        stopped_by: number of the signal that all ranks stopped for; 0 otherwise.
        unsaved: why the last step is not saved; "" if it is.
    """

    def __init__(self, model: ParallelModel, settings: Checkpoints, config: dict) -> None:
        super().__init__()
        self.model, self.world, self.config = model, model.mesh.world, config
        self.settings: Checkpoints = comm.all_gather_object(settings, self.world)[0]
        self.stopped_by, self.unsaved = 0, ""
        self._save: Save | None = None
        self._path, self._run = "", {}
        self._check_folder()

    def _check_folder(self) -> None:
        """Lock the folder. Raises CheckpointError on every rank if they have different ones, or a run uses it."""
        path, problem = self.settings.checkpoint, ""
        token = f"{files.TOKEN}{self.world.rank}-{os.getpid()}-{time.time_ns()}"
        try:
            if self.world.rank == 0:
                self.callback(files.Lock(path).release)
            files.leave(path, token)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = files.cannot_write(path, error)
        said = comm.all_gather_object((token, problem), self.world)
        problem = next((problem for _, problem in said if problem), "")
        if not problem and self.world.rank == 0:
            names = [name for name, _ in said]
            if lost := files.unseen(path, dict.fromkeys(names, 0)):
                others = named_ranks([names.index(name) for name in lost])
                problem = (
                    f"--checkpoint {path} is not one folder: rank 0 does not see what {others} wrote there; give a "
                    "folder that all machines share, such as one on NFS"
                )
        problem = comm.all_gather_object(problem, self.world)[0]
        files.remove(path, token)
        if problem:
            self.close()
            raise CheckpointError(problem)

    def resume(self, report: dict) -> int:
        """Continue from the chosen checkpoint: fill the model and the report; return the number of finished steps.

        Raises:
            CheckpointError: the checkpoint cannot be read, or has a different kind of optimizer; on every rank.
        """
        run = comm.all_gather_object(self._chosen() if self.world.rank == 0 else None, self.world)[0]
        if isinstance(run, CheckpointError):
            raise run
        if run is None:
            return 0
        ours = type(self.model.optimizer).__name__
        if run["optimizer"] != ours:
            raise CheckpointError(
                f"{self.settings.resume} has the state of {run['optimizer']}, and this run steps with {ours}"
            )
        restore(self.model, self.settings.resume)
        report["losses"] += run["losses"]
        report["validation"] += map(tuple, run["validation"])
        return run["step"]

    def _chosen(self) -> dict | CheckpointError | None:
        """Remove what an earlier run left; return the data of the chosen checkpoint, if any, or what is wrong."""
        try:
            folder.remove_leftovers(self.settings.checkpoint)
            return folder.run_of(self.settings.resume) if self.settings.resume else None
        except CheckpointError as error:
            return error
        except OSError as error:
            return CheckpointError(files.cannot_write(self.settings.checkpoint, error))

    def after(self, step: int, report: dict, is_last: bool) -> bool:
        """Save between two steps if it is time; return whether to stop, equal on all ranks.

        Args:
            step: number of finished steps.
            report: the measurements so far, on rank 0.
        """
        wish = self.asked(self.world.rank, self.settings.checkpoint)
        mine = torch.tensor([wish, self._save is not None and self._save.writes], dtype=torch.int32)
        self.stopped_by, writes = comm.all_reduce(mine.to(device()), self.world, "max").tolist()
        is_last = is_last or bool(self.stopped_by)
        is_due = is_last or step % self.settings.checkpoint_every == 0
        if is_due or not writes:
            problem = self._finish()
            if problem and self.world.rank == 0:  # the next checkpoint may succeed
                print(f"\n{problem}", file=sys.stderr)
        if is_due:
            self._begin(step, report)
        if is_last:
            self.unsaved = self._finish()
        return bool(self.stopped_by)

    def _begin(self, step: int, report: dict) -> None:
        self._path = folder.path_of(self.settings.checkpoint, step)
        self._run = {
            "step": step,
            "optimizer": type(self.model.optimizer).__name__,
            "config": self.config,
            "losses": list(report["losses"]),
            "validation": list(report["validation"]),
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._save = Save(self.model, folder.hidden(self._path))

    def _finish(self) -> str:
        """Wait for the save in progress, if any, and give it its name; return why it failed, or ""."""
        if self._save is None:
            return ""
        problem, self._save = self._save.finish(), None
        if self.world.rank == 0:
            try:
                if not problem:
                    folder.publish(self._path, self._run, self.settings.keep)
            except OSError as error:
                problem = files.reason(error)
            if problem:
                folder.remove_unfinished(folder.hidden(self._path))
                name = os.path.basename(self._path)
                problem = f"{name} could not be written to {self.settings.checkpoint}: {problem}; older ones are kept"
        return comm.all_gather_object(problem, self.world)[0]
