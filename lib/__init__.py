"""Parallel by Hand: the parallel layers, schedules and runtime that the book teaches.

The path is the idea: `from lib.data_parallel.ddp import BucketedDDP`. Only what every chapter uses is found here, and
nothing is imported before it is asked for, so that the pure Python parts never wait for torch.
"""

BOOK = "parallel-by-hand"  # how a notebook's first cell knows that it has found this `lib` and not another

_HOME = {
    "run": "lib.launch",
    "claim": "lib.verify",
    "Explorer": "lib.explorer",
}

__all__ = [*_HOME, "BOOK"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"lib has no {name!r}; it offers {', '.join(_HOME)}, and its modules by their path")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
