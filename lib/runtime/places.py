"""Which line of the reader's called: `Cell In[5], line 3, in step: comm.send(...)`.

A call of `lib.comm` has frames of this library and of torch above it that say nothing to a reader. So look up the stack
for the first line that is neither, and name its file as the reader knows it.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig

_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")  # the folder lib
_MACHINE = tuple(os.path.join(_HERE, name) for name in (os.path.join("runtime", ""), "comm.py", "mesh.py"))
_PATHS = {os.path.join(sysconfig.get_paths()[name], "") for name in ("purelib", "platlib", "stdlib")}
_LIBRARIES = sorted(_PATHS, key=len, reverse=True)  # one may lie inside another

cells: dict[str, str] = {}  # file name of a notebook cell -> how to call it, set by launch


def where() -> str:
    """The caller's own line, outside this library and torch: `Cell In[5], line 3, in step: comm.send(...)`."""
    frame, inside = sys._getframe(1), None
    while frame is not None and _library[frame.f_code.co_filename]:
        if inside is None and not frame.f_code.co_filename.startswith(_MACHINE):
            inside = frame  # a program of the library itself, as `lib.train`: then the line that called the machine
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


_places: dict[tuple, str] = {}  # (code, line) -> how to say it


class _Library(dict):
    """File → whether it is of Python's, of a package, or of this library. Each call asks for twenty frames' files."""

    def __missing__(self, file: str) -> bool:
        known = self[file] = file.startswith((_HERE, "<frozen", "<string>", *_LIBRARIES))
        return known


_library = _Library()


def is_library(file: str) -> bool:
    """Whether a file is of Python's, of a package, or of this library: no reader's."""
    return _library[file]


def short(file: str) -> str:
    """A file as a reader knows it: `Cell In[5]`, `lib/comm.py`, `train.py`."""
    if file in cells:
        return cells[file]
    for root in (*_LIBRARIES, os.path.join(os.path.dirname(_HERE[:-1]), "")):
        if file.startswith(root):
            return os.path.relpath(file, root)
    return os.path.basename(file)
