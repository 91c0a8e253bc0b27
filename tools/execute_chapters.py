"""Executes the chapters, three at a time, and keeps their outputs in _build/.jupyter_cache, where Sphinx looks.

Ranks that sleep or wait leave the processor to others, so several chapters take little longer than one. Beside a
cell with the tag `alone` no other cell runs: it measures times, which a neighbour would change.
"""

import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Condition

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from page_form import tags
from set_repository import ROOT
from tqdm import tqdm

AT_A_TIME, TIMEOUT_S = 3, 120


class Turns:
    """Which notebooks have a cell at work: several, or one that is alone."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.working, self.to_be_alone = set(), 0  # notebooks at work, and how many are alone or wait to be

    def begin(self, notebook: Path, alone: bool) -> None:
        with self.changed:
            self.to_be_alone += alone
            self.changed.wait_for(lambda: not self.working if alone else not self.to_be_alone)
            self.working.add(notebook)

    def end(self, notebook: Path, alone: bool) -> None:
        with self.changed:
            self.to_be_alone -= alone
            self.working.discard(notebook)
            self.changed.notify_all()


def execute(path: Path, turns: Turns):
    """The notebook with its outputs, and the seconds it took; raises what a cell raises."""
    began = []  # the cell at work, which does not end if it takes too long

    def begin(cell, cell_index):
        turns.begin(path, "alone" in tags(cell))
        began.append(cell)

    def end(**_):
        turns.end(path, "alone" in tags(began.pop()))

    try:
        return single_nb_execution(
            nbformat.read(path, as_version=4),
            cwd=str(path.parent),
            timeout=TIMEOUT_S,
            allow_errors=False,
            on_cell_execute=begin,
            on_cell_executed=end,
        )
    finally:
        if began:
            end()


def main(paths: list[Path]) -> int:
    cache, turns = get_cache(ROOT / "_build" / ".jupyter_cache"), Turns()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        waiting = {pool.submit(execute, path, turns): path for path in paths}
        for done in tqdm(as_completed(waiting), total=len(paths), unit="chapter", disable=None):
            path, result = waiting[done], done.result()
            if result.err:
                pool.shutdown(cancel_futures=True)
                print(f"{path.relative_to(ROOT)}:\n{result.exc_string}", file=sys.stderr)
                return 1
            bundle = CacheBundleIn(result.nb, str(path), data={"execution_seconds": result.time})
            cache.cache_notebook_bundle(bundle, check_validity=False)
            tqdm.write(f"{path.relative_to(ROOT)} executed in {result.time:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sorted(ROOT.glob("chapters/*.ipynb"), reverse=True)))  # the longest are among the last
