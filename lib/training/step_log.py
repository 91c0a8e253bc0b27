"""A log that grows while a run trains: `--log FILE` has one JSON line a step.

The problem: a report is written when a run ends, and a run that is killed has none. The idea: a line goes to the
operating system as soon as its step is done, and a process that is killed afterwards takes nothing with it.
"""

from __future__ import annotations

import json
import math
import os
import sys


class StepLog:
    """The log of one run, on one rank.

    A line has `step`, from 0, its `loss` before the step, `lr`, `seconds`, and sometimes `validation`, the loss on the
    validation text, also before the step. The last line may have only `step`, the number of all steps, and
    `validation`. A number that is not finite is a text: "nan". If the disk is full, training goes on without a log.

    Args:
        path: the file. A new run begins it anew.
        continues: the run continues from a checkpoint, and adds to the file; of two lines of a step the later counts.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, continues: bool = False) -> None:
        self.path = path
        self._file = open(path, "a" if continues else "w", encoding="utf-8", buffering=1)  # noqa: SIM115 until close
        if continues and os.path.isfile(path) and os.path.getsize(path):
            with open(path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the disk was full, or the machine lost its power, in a line
                    self._file.write("\n")

    def write(self, **line: float) -> None:
        """Add a line."""
        if self._file.closed:
            return
        said = {name: x if math.isfinite(x) else str(x) for name, x in line.items()}
        try:
            self._file.write(json.dumps(said) + "\n")
        except OSError as error:
            print(f"\n--log {self.path} ends here: {error.strerror}; training goes on", file=sys.stderr)
            self.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError:  # what could not be written before
            pass
