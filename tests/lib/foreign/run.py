"""Runs foreign programs: ranks start once for each world size, and take one case after the other."""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.lib.foreign.training import Settings, Training


class Case(NamedTuple):
    """A program to run: in which layout, on how many ranks, and with which mistake (`Training` has none)."""

    layout: str
    ranks: int
    program: type[Training] = Training
    settings: Settings = Settings()

    @property
    def folder(self) -> str:
        special = [f"{key}={value}" for key, value in self.settings._asdict().items() if value != DEFAULTS[key]]
        return "-".join([self.program.__name__, self.layout, str(self.ranks), *special])

    @property
    def alone(self) -> "Case":
        """The same training in one process."""
        return Case("one", 1, settings=self.settings._replace(microbatches=1))


DEFAULTS = Settings()._asdict()
PATIENCE = timedelta(seconds=60)


def record(cases: Iterable[Case], folder: str | Path) -> None:
    """Run each case, and the same in one process; `watch` writes into `folder / case.folder`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank, and the folder of its case.
    """
    listed = list(cases)
    wanted = dict.fromkeys(listed + [case.alone for case in listed])
    for ranks in sorted({case.ranks for case in wanted}):
        some = [case for case in wanted if case.ranks == ranks]
        with tempfile.TemporaryDirectory() as private, patch.object(tempfile, "tempdir", private):  # tracebacks too
            mp.start_processes(run_rank, (ranks, some, Path(folder), private), ranks, start_method="fork")


def run_rank(rank: int, ranks: int, cases: list[Case], folder: Path, private: str) -> None:
    """In a rank's process: all cases of a world size."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns of what its own layouts do
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ranks > 1:
        store = dist.FileStore(f"{private}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    for case in cases:
        try:
            case.program(case.layout, case.settings, folder / case.folder).run()
        except Exception as error:
            error.add_note(f"in {case.folder}")
            raise
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
