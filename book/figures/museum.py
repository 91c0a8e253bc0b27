"""The rooms of the museum on a page: what the victims had, and what each check says in all the rooms."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import torch

import course.exercises
from book.figures.dots import BAD, DOT, NOTHING, RING, draw_dots
from book.figures.exhibits import DRAWN
from book.figures.svg import Figure
from course.museum.room import FIRES, SILENT, Room, RunSeen

NOT_HERE, UNWRITTEN, FALSE_ALARM = "–", "not written yet", "false alarm"
MEANINGS = {FIRES: "finds it", SILENT: "looks, and is silent", FALSE_ALARM: "false alarm", NOT_HERE: "cannot look"}
SHOWN_AS = {FIRES: DOT, FALSE_ALARM: BAD, SILENT: RING, NOT_HERE: NOTHING}


@dataclass(frozen=True)
class Exhibit:
    """What the victims of a bug had: rows of a table, the first its head, or a text such as a hang report."""

    shown: str | Sequence[Sequence[object]]

    def __repr__(self) -> str:
        if isinstance(self.shown, str):
            return self.shown
        rows = [[f"{cell}" for cell in row] for row in self.shown]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        if isinstance(self.shown, str):
            return f'<pre class="exhibit">{escape(self.shown)}</pre>'
        head, *rows = ([escape(f"{cell}") for cell in row] for row in self.shown)
        titles = "".join(_head(cell, "col") for cell in head)
        body = "".join(
            f"<tr>{_head(name, 'row')}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows
        )
        return (
            '<div class="pst-scrollable-table-container" tabindex="0"><table class="exhibit">'
            f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
        )


@dataclass(frozen=True)
class ExhibitDrawn:
    """The picture of an exhibit, and its numbers behind a fold."""

    figure: Figure
    numbers: Exhibit

    def __repr__(self) -> str:
        return f"{self.figure!r}\n{self.numbers!r}"

    def _repr_html_(self) -> str:
        fold = f"<details><summary>The numbers</summary>{self.numbers._repr_html_()}</details>"
        return f"{self.figure._repr_html_()}{fold}"


class Verdicts(Exhibit):
    """What checks say of the sick run in each room; the first row has the rooms."""

    def drawn(self, title: str, caption: str = "") -> Figure:
        """As dots: a row for each check, a column for each room.

        Raises:
            NotImplementedError: one of the checks is not written yet.
        """
        (_, *head), *rows = self.shown
        for name, *said in rows:
            if UNWRITTEN in said:
                raise NotImplementedError(f"{name} is not written yet: write it, or leave it out of the picture")
        alt = f"A row for each check, a column for each of rooms {head[0]} to {head[-1]}."
        for name, *said in rows:
            for words in (FIRES, FALSE_ALARM):
                if found := [room for room, one in zip(head, said, strict=True) if one == words]:
                    alt += f" {name}: {words} in {', '.join(found)}."
        return draw_dots(
            {name: [SHOWN_AS[words] for words in said] for name, *said in rows},
            [room.partition(".")[2] for room in head],
            title=title,
            alt=alt,
            legend={SHOWN_AS[words]: of for words, of in MEANINGS.items() if any(words in said for _, *said in rows)},
            caption=caption,
        )


def _head(words: str, scope: str) -> str:
    """Of a column or a row; without words it is no header."""
    return f'<th scope="{scope}">{words}</th>' if words else "<td></td>"


@cache
def rooms() -> dict[str, Room]:
    """Id of its exercise → room, in the order of the ids."""
    files = (path for folder in course.exercises.__path__ for path in Path(folder).glob("ch15/e15_*.py"))
    found = [importlib.import_module(f"course.exercises.ch15.{path.stem}") for path in files]
    made = [module.ROOM for module in found if hasattr(module, "ROOM")]
    return {room.id: room for room in sorted(made, key=lambda room: int(room.id.partition(".")[2]))}


def exhibit(id: str) -> Exhibit:
    """What the victims had in the room of an exercise, such as `"15.4"`: the sick program runs, here and now."""
    return Exhibit(rooms()[id].exhibit(_victims(id)))


def exhibit_drawn(id: str) -> ExhibitDrawn:
    """The same as a picture, with the numbers behind a fold."""

    def healthy() -> RunSeen:
        room, seed = rooms()[id], _victims(id).seed
        (run,) = room.runs([(0, dict.fromkeys(room.layouts[0], 1), seed)])
        return run

    return ExhibitDrawn(DRAWN[id](_victims(id), healthy), exhibit(id))


def elsewhere(*checks: Callable[[RunSeen], object]) -> Verdicts:
    """What checks say of the sick run in each room: a row for each check.

    A false alarm: the check fires on the healthy run as well. A dash: the run has not the numbers that it looks at.
    """
    names = [getattr(check, "__name__", f"{check}").replace("_", " ") for check in checks]
    rows = [(name, *(_said(check, id) for id in rooms())) for name, check in zip(names, checks, strict=True)]
    return Verdicts([["room", *rooms()], *rows])


def differs_from_one_process(run: RunSeen) -> str:
    """The simplest check: which number of rank 0 one process has in the same shape, with a different value; or "".

    Raises:
        AttributeError: the room has no run in one process.
        KeyError: the run has none of these numbers.
    """
    ours, right = run.ranks[0], run.alone.ranks[0]
    found = {name: (ours[name], right[name]) for name in ("loss", "output", "gradient") if name in ours}
    found |= {name: (mine, right["gradients"][name]) for name, mine in ours.get("gradients", {}).items()}
    if not found:
        raise KeyError("no loss, output or gradient to compare")
    for name, pair in found.items():
        mine, one = map(torch.as_tensor, pair)
        if mine.shape == one.shape and not torch.allclose(mine, one):
            return f"{name}: one process has a different one"
    return ""


@cache
def _victims(id: str) -> RunSeen:
    return rooms()[id].victims()


@cache
def _healthy(id: str) -> RunSeen:
    room = rooms()[id]
    (run,) = room.runs([(0, room.layouts[0], _victims(id).seed)])
    return run


def _said(check: Callable[[RunSeen], object], id: str) -> str:
    try:
        if not check(_victims(id)):
            return SILENT
        return FALSE_ALARM if check(_healthy(id)) else FIRES
    except NotImplementedError:
        return UNWRITTEN
    except Exception:  # of somebody's check, on a run that it was not written for
        return NOT_HERE
