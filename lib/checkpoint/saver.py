"""When a run saves: every few steps and at its end; and how it resumes.

The problem: a save takes as long as many steps, and if every rank waits for the disk, the cluster is idle.
The idea: copy the state in memory, and let a thread write it while training continues. Threads that communicate during
training can deadlock, so this thread never does. One all-reduce (max) of two numbers after each step shows the ranks
whether all finished. When no rank is writing, rank 0 gives the checkpoint its name.

A run that is asked to stop saves first. A run that is killed loses the steps since the last complete checkpoint: at
most `checkpoint_every` and those during which it was written.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

import torch

from lib import comm
from lib.checkpoint import folder
from lib.checkpoint.settings import CheckpointError, Checkpoints, reason
from lib.checkpoint.shared import TOKEN, Lock, leave_token, remove, unseen
from lib.checkpoint.stop import Signals, wished
from lib.checkpoint.storage import Save, gather, restore
from lib.launch import device
from lib.parallel import ParallelGPT
from lib.runtime.hang import named_ranks


class Saver(Signals):
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

    def __init__(self, model: ParallelGPT, settings: Checkpoints, config: dict) -> None:
        super().__init__()
        self.model, self.world, self.config = model, model.mesh.world, config
        self.settings: Checkpoints = gather(settings, self.world)[0]
        self.stopped_by, self.unsaved = 0, ""
        self._save: Save | None = None
        self._path, self._run = "", {}
        self._lock: Lock | None = None
        self._check_folder()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _check_folder(self) -> None:
        """Lock the folder, and check that all ranks write into the same one.

        Raises:
            CheckpointError: they do not, or a different run uses it; on every rank.
        """
        path, problem = self.settings.checkpoint, ""
        token = f"{TOKEN}{self.world.rank}-{os.getpid()}-{time.time_ns()}"
        if self.world.rank == 0:
            try:
                self._lock = Lock(path)
            except CheckpointError as error:
                problem = str(error)
        said = gather((token, problem or leave_token(path, token)), self.world)
        problem = next((problem for _, problem in said if problem), "")
        if not problem and self.world.rank == 0:
            names = [name for name, _ in said]
            if lost := unseen(path, dict.fromkeys(names, 0)):
                others = named_ranks([names.index(name) for name in lost])
                problem = (
                    f"--checkpoint {path} is not one folder: rank 0 does not see what {others} wrote there; give a "
                    "folder that all machines share, such as one on NFS"
                )
        problem = gather(problem, self.world)[0]
        remove(path, token)
        if problem:
            self._release()
            raise CheckpointError(problem)

    def resume(self, report: dict) -> int:
        """Continue from the chosen checkpoint: fill the model and the report.

        Returns:
            The number of finished steps.

        Raises:
            CheckpointError: the checkpoint cannot be read, or has a different kind of optimizer.
        """
        if self.world.rank == 0:
            folder.remove_leftovers(self.settings.checkpoint)
        if self.settings.resume is None:
            return 0
        run = gather(folder.run_of(self.settings.resume) if self.world.rank == 0 else None, self.world)[0]
        ours = type(self.model.optimizer).__name__
        if run["optimizer"] != ours:
            raise CheckpointError(
                f"{self.settings.resume} has the state of {run['optimizer']}, and this run steps with {ours}"
            )
        restore(self.model, self.settings.resume)
        report["losses"] += run["losses"]
        report["validation"] += map(tuple, run["validation"])
        return run["step"]

    def after(self, step: int, report: dict, is_last: bool) -> bool:
        """Save between two steps if it is time; return whether to stop, equal on all ranks.

        Args:
            step: number of finished steps.
            report: the measurements so far, on rank 0.
        """
        wish = self.number or (wished(self.settings.checkpoint) if self.world.rank == 0 else 0)
        mine = torch.tensor([wish, self._save is not None and self._save.writes], dtype=torch.int32)
        self.stopped_by, writes = comm.all_reduce(mine.to(device()), self.world, "max").tolist()
        is_last = is_last or bool(self.stopped_by)
        is_due = is_last or step % self.settings.checkpoint_every == 0
        if is_due or not writes:
            self._warn(self._finish())
        if is_due:
            self._begin(step, report)
        if is_last:
            self.unsaved = self._finish()
        return bool(self.stopped_by)

    def _warn(self, problem: str) -> None:
        """Print a warning and continue: the next checkpoint may succeed."""
        if problem and self.world.rank == 0:
            print(f"\n{problem}", file=sys.stderr)

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
                problem = reason(error)
            if problem:
                shutil.rmtree(folder.hidden(self._path), ignore_errors=True)
                name = os.path.basename(self._path)
                problem = f"{name} could not be written to {self.settings.checkpoint}: {problem}; older ones are kept"
        return gather(problem, self.world)[0]
