"""What figures and mechanisms have drawn, and what holds of every drawing: it stays inside and its words fit."""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

from book.figures.player import NARROW, WIDE
from book.figures.svg import SMALLEST_PX, Figure, text_width

# ---- figures ---------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """A path: its lines, each a list of points, and its paint."""

    lines: list[list[tuple[float, float]]]
    paint: dict[str, str]
    tip: str = ""

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The least x and y, and the greatest, of all its points."""
        xs, ys = zip(*(point for line in self.lines for point in line), strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def middle(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


def parse(svg: Figure | str) -> ElementTree.Element:
    return ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", getattr(svg, "svg", svg)))


def painted(element: ElementTree.Element, inherited: dict[str, str] | None = None) -> Iterator[tuple]:
    """Each element, from back to front, with its attributes and those that it inherits."""
    own = (inherited or {}) | element.attrib
    yield element, own
    for child in element:
        yield from painted(child, own)


def texts(figure: Figure) -> list[str]:
    """All words of a figure."""
    return [text.text for text in parse(figure).iter("text")]


def paths(figure: Figure, **paint: str) -> list[Drawn]:
    """The paths with this paint: `stroke="comm"` for a colour of the palette."""
    wanted = {key.replace("_", "-"): (value, f"var(--pbh-{value},") for key, value in paint.items()}
    return [
        Drawn(_points(element.get("d")), own, element.findtext("title", ""))
        for element, own in painted(parse(figure))
        if element.tag == "path"
        if all(own.get(key) == value or own.get(key, "").startswith(ink) for key, (value, ink) in wanted.items())
    ]


def _points(path: str) -> list[list[tuple[float, float]]]:
    """The ends of all that a path consists of; its start is absolute and all else relative to where the pen is."""
    lines, x, y = [], 0.0, 0.0
    for letter, numbers in re.findall(r"([Mlqc])([^Mlqcz]*)", path):
        values = [float(number) for number in numbers.split()]
        x, y = (values[-2], values[-1]) if letter == "M" else (x + values[-2], y + values[-1])
        if letter == "M":
            lines.append([])
        lines[-1].append((round(x, 1), round(y, 1)))
    return lines


def words_of(svg):
    """(words, left, top, right, bottom) of all words of a drawing, about where they are."""
    found = []
    for element, own in painted(parse(svg)):
        if element.tag == "text" and element.text:
            size = float(own.get("font-size", 13))
            wide, x, y = text_width(element.text, size), float(own["x"]), float(own["y"])
            left = x - wide * {"middle": 0.5, "end": 1}.get(own.get("text-anchor"), 0)
            found.append((element.text, left, y - 0.72 * size, left + wide, y + 0.2 * size))
    return found


def check_words(svg):
    """Raises AssertionError where words leave a drawing or lie on others."""
    *_, width, height = map(float, re.search(r'viewBox="([^"]*)"', svg)[1].split())
    found = words_of(svg)
    assert found, "no words"
    for words, left, top, right, bottom in found:
        assert left >= -1 and right <= width + 1 and top >= 0 and bottom <= height, words
    for (a, left, top, right, bottom), (b, x0, y0, x1, y1) in combinations(found, 2):
        assert right <= x0 + 0.5 or x1 <= left + 0.5 or bottom <= y0 or y1 <= top, (a, b)


# ---- mechanisms ------------------------------------------------------------------------------------------------------

HIGHEST = {WIDE: 420, NARROW: 520}  # pixels
LINES = ("outline", "frame", "bad")


def check_drawing(player):
    """Raises AssertionError where it is too long to be played, a thing leaves the drawing, or its words the thing."""
    assert 3 <= len(player.beats) <= 7
    assert max(map(len, player.sentences)) <= 140, max(player.sentences, key=len)
    assert max(len(beat.name) for beat in player.beats) <= 15
    check_inside(player)
    for *_, where, thing in things_of(player):
        if thing.words and thing.seen:
            assert text_width(thing.words, SMALLEST_PX) <= thing.width + 1 and thing.height >= SMALLEST_PX, where


def check_inside(player):
    """Raises AssertionError where a thing leaves the drawing."""
    for scene, width in zip(player.scenes, (WIDE, NARROW), strict=True):
        assert scene.height <= HIGHEST[width]
        check_lines(scene, width)
    for scene, width, where, (x, y, wide, high, *_) in things_of(player):
        assert min(x, y, wide, high) > -1e-6, where
        assert x + wide < width + 1e-6 and y + high < scene.height + 1e-6, where


def things_of(player):
    """(scene, its width, words that say where, thing) for everything in each frame."""
    for scene, width in zip(player.scenes, (WIDE, NARROW), strict=True):
        for number, frame in enumerate(scene.frames):
            for name, thing in frame.items():
                yield scene, width, f"{name!r} in frame {number} at {width} pixels", thing


def check_lines(scene, width):
    """Raises AssertionError where the edge of a drawing cuts a line around a box: half of it is outside of the box."""
    drawn = ElementTree.fromstring(f"<svg>{scene.canvas.drawing()}</svg>").iter("rect")
    boxes = [(float(box.get("x", 0)), float(box.get("width")), "still") for box in drawn if box.get("stroke")]
    moving = [(name, thing) for step in scene.frames for name, thing in step.items() if thing.ink in LINES]
    for x, wide, name in [*boxes, *((thing.x, thing.width, name) for name, thing in moving)]:
        assert 0.5 <= x and x + wide <= width - 0.5, f"{name!r} at {width} pixels"


def collisions(step, *inks):
    """Names of things of these inks that lie on one another without lying in the same place."""
    seen = [(name, thing) for name, thing in step.items() if thing.ink in inks and thing.seen]
    return [
        (a, b)
        for i, (a, one) in enumerate(seen)
        for b, other in seen[i + 1 :]
        if one[:4] != other[:4]
        and one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    ]
