"""The line of the reader's code that made a call: `Cell In[5], line 3, in step: comm.send(...)`.

The stack of a call of `lib.comm` holds frames of this library and of torch. So search it for the first frame outside
both, and name its file as the reader knows it.
"""

import linecache
import os
import sys
import sysconfig

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FLOORS = [os.path.join(ROOT, name, "") for name in ("lib", "course", "book")]  # this library, and what stands on it
_HERE = FLOORS[0]
_MACHINE = tuple(os.path.join(_HERE, name) for name in (os.path.join("runtime", ""), "comm.py", "mesh.py"))
_PATHS = {os.path.join(sysconfig.get_paths()[name], "") for name in ("purelib", "platlib", "stdlib")}
_LIBRARIES = sorted(_PATHS, key=len, reverse=True)  # one may be inside another

cells: dict[str, str] = {}  # file name of a notebook cell -> its name in reports, set by launch


def where() -> str:
    """The caller's own line, outside this library and torch: `Cell In[5], line 3, in step: comm.send(...)`."""
    frame, inside = sys._getframe(1), None
    while frame is not None and _library[frame.f_code.co_filename]:
        if inside is None and not frame.f_code.co_filename.startswith(_MACHINE):
            inside = frame  # a program of this library, such as `lib.train`
        frame = frame.f_back
    frame = frame or inside or sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    text = _places.get(place)
    if text is None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(file, line).strip()
        if len(source) > 100:
            source = source[:99] + "…"
        text = f"{short(file)}, line {line}, in {frame.f_code.co_name}" + (f": {source}" if source else "")
        _places[place] = text
    return text


_places: dict[tuple, str] = {}  # (code, line) -> text


class _Library(dict):
    """File → whether it belongs to Python, a package, or this book; cached: a call looks up twenty files."""

    def __missing__(self, file: str) -> bool:
        known = self[file] = file.startswith((*FLOORS, "<frozen", "<string>", *_LIBRARIES))
        return known


_library = _Library()


def is_library(file: str) -> bool:
    """Whether a file belongs to Python, a package or this book, and not to the reader."""
    return _library[file]


def short(file: str) -> str:
    """A file as a reader knows it: `Cell In[5]`, `lib/comm.py`, `train.py`."""
    if file in cells:
        return cells[file]
    for root in (*_LIBRARIES, os.path.join(ROOT, "")):
        if file.startswith(root):
            return os.path.relpath(file, root)
    return os.path.basename(file)
