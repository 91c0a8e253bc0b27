"""The line of the reader's code that made a call: `Cell In[5], line 3, in step: comm.send(...)`.

The stack of a call of `lib.comm` holds frames of this library and of torch. So search it for the first frame outside
both, and name its file as the reader knows it.
"""

import linecache
import os
import sys
import sysconfig
import types
from functools import cache

PACKAGE = __name__.removesuffix(".runtime.places")  # `lib`, or the name that a copy has
LIB = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
ROOT = os.path.abspath(os.path.join(LIB, *[".."] * len(PACKAGE.split("."))))  # from here the package is imported
_MACHINE = tuple(os.path.join(LIB, name) for name in (os.path.join("runtime", ""), "comm.py", "mesh.py"))
_PATHS = {os.path.join(sysconfig.get_paths()[name], "") for name in ("purelib", "platlib", "stdlib")}
_LIBRARIES = sorted(_PATHS, key=len, reverse=True)  # one may be inside another

cells: dict[str, str] = {}  # file name of a notebook cell -> its name in reports, set by launch
packages: dict[str, tuple[str, ...]] = {}  # folder of a package that stands on this library -> modules for all ranks


def stands_on_lib(folder: str, *modules: str) -> None:
    """Tell of a package that stands on this library: its lines are never named as the reader's.

    Args:
        folder: of the package.
        modules: of it, by name, that the server of ranks imports before it forks one, so that no rank has to. The
            server is replaced when a file of the package changes. A server that runs already does not import them: the
            next one will.
    """
    packages[os.path.join(os.path.abspath(folder), "")] = modules
    is_library.cache_clear()


def where() -> str:
    """The reader's line that led here; without one, that of the program of this library."""
    frame, inside = sys._getframe(1), None
    while frame is not None and is_library(frame.f_code.co_filename):
        if inside is None and not frame.f_code.co_filename.startswith(_MACHINE):
            inside = frame  # a program of this library, such as `lib.train`
        frame = frame.f_back
    frame = frame or inside or sys._getframe(1)
    return _line(frame.f_code, frame.f_lineno)


@cache
def _line(code: types.CodeType, line: int) -> str:
    source = linecache.getline(code.co_filename, line).strip()
    if len(source) > 100:
        source = source[:99] + "…"
    return f"{short(code.co_filename)}, line {line}, in {code.co_name}" + (f": {source}" if source else "")


@cache  # a call looks up twenty files
def is_library(file: str) -> bool:
    """Whether a file belongs to Python, a package or this book, and not to the reader."""
    return file.startswith((LIB, *packages, "<frozen", "<string>", *_LIBRARIES))


def short(file: str) -> str:
    """A file as a reader knows it: `Cell In[5]`, `lib/comm.py`, `train.py`."""
    if file in cells:
        return cells[file]
    root = next((root for root in (*_LIBRARIES, os.path.join(ROOT, "")) if file.startswith(root)), None)
    return os.path.relpath(file, root) if root else os.path.basename(file)
