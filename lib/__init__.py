"""Parallel by Hand: the parallel layers, schedules and runtime that the book teaches.

The path is the idea: `from lib.data_parallel.ddp import BucketedDDP`. This file offers only the names that every
chapter uses, and imports none before its first use, so that the pure Python parts never wait for torch. A kernel that
is too old reads only this file, so any Python 3 can run it.
"""

BOOK = "parallel-by-hand"  # by it the first cell of a notebook recognises this `lib`
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 8)
SMALL = ("cloudpickle", "matplotlib", "numpy", "tqdm")  # the library imports these and torch

_HOME = {"run": f"{__name__}.launch", "claim": f"{__name__}.lab.claims"}

__all__ = [*_HOME, "BOOK", "ready"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"lib has no {name!r}; it offers {', '.join(_HOME)}, and its modules by their path")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def _say_interrupted(result):
    """After each cell: an import that Ctrl-C ended leaves half of a package, which Python cannot import again."""
    import sys

    for package in ("torch", "numpy"):
        if package not in sys.modules and any(name.startswith(package + ".") for name in list(sys.modules)):
            print(f"The import of {package} was interrupted: restart the kernel, then run the first cell again.")


def ready(book):
    """Check for the first cell of a notebook that this kernel can run the book.

    It installs small packages that are missing; it never installs or replaces torch.

    Args:
        book: folder of the book that the notebook belongs to.

    Raises:
        ImportError: Python or torch is too old, a package is missing, or `lib` is of a different copy of the book; the
            sentence gives the cause and the remedy.
    """
    import importlib.util
    import os
    import re
    import subprocess
    import sys

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.realpath(folder) != os.path.realpath(book):
        raise ImportError(
            f"lib was imported from another copy of the book, {folder}, and this notebook belongs to {book}: restart "
            "the kernel, then run this cell first."
        )
    if sys.version_info < OLDEST_PYTHON:
        raise ImportError(
            f"This kernel runs Python {'.'.join(map(str, sys.version_info[:2]))}, and the book needs "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer: choose another kernel, or make one with a newer Python."
        )
    from importlib import metadata

    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        sys.modules["IPython"].get_ipython().events.register("post_run_cell", _say_interrupted)  # once
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"torch is not installed in this kernel, {sys.executable}: choose the kernel that has it, or install it "
            "there as pytorch.org says."
        ) from None
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < OLDEST_TORCH:
        raise ImportError(
            f"torch {torch} is installed, and the book needs {'.'.join(map(str, OLDEST_TORCH))} or newer: upgrade it, "
            "restart the kernel, then run this cell first."
        )
    missing = [name for name in SMALL if importlib.util.find_spec(name) is None]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *missing]
        pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if pip.returncode:
            said = " ".join(pip.stdout.split())
            raise ImportError(f"{' and '.join(missing)} could not be installed: {said[-500:]}")
        importlib.invalidate_caches()
