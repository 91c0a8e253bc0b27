"""Whose line it was: the reader's own, with a name that the reader knows."""

import linecache

import pytest

from lib.runtime import places


def test_where_names_the_readers_line(monkeypatch):
    here = places.where()
    assert here.endswith("in test_where_names_the_readers_line: here = places.where()")
    assert "test_places.py, line" in here
    monkeypatch.setitem(places.cells, "<cell>", "Cell In[7]")
    source = f"def step():\n    return {'1 + ' * 60}0, where()\n"
    monkeypatch.setitem(linecache.cache, "<cell>", (len(source), None, source.splitlines(True), "<cell>"))
    space = {"where": places.where}
    exec(compile(source, "<cell>", "exec"), space)
    line = space["step"]()[1]
    assert line.startswith("Cell In[7], line 2, in step: return 1 + 1 + ") and line.endswith("…") and len(line) < 140
    assert places.short(places.__file__) == "lib/runtime/places.py"
    assert places.short(pytest.__file__).startswith("pytest")
    assert places.short("/elsewhere/train.py") == "train.py"
    assert not places.is_library("/elsewhere/mine/train.py")
    monkeypatch.setattr(places, "packages", {})
    places.stands_on_lib("/elsewhere/mine")
    assert places.is_library("/elsewhere/mine/train.py") and not places.is_library("/elsewhere/mine.py")
    places.is_library.cache_clear()
    assert not places.is_library(places.LIB[:-1] + "rary/mine.py"), "a folder whose name only begins like ours"
