"""What holds of every drawing: it stays inside and its words fit; one of a mechanism is short enough to be played."""

import re
from itertools import combinations
from xml.etree import ElementTree

from book.figures.player import NARROW, WIDE
from book.figures.svg import SMALLEST_PX, text_width

HIGHEST = {WIDE: 420, NARROW: 520}  # pixels
LINES = ("outline", "frame", "bad")


def check_drawing(player):
    """Raises AssertionError where a thing leaves the drawing, or its words leave the thing."""
    assert 5 <= len(player.sentences) <= 14
    assert all(len(sentence) <= 120 for sentence in player.sentences), max(player.sentences, key=len)
    for scene, width in zip(player.scenes, (WIDE, NARROW), strict=True):
        assert scene.height <= HIGHEST[width]
        check_lines(scene, width)
        for number, step in enumerate(scene.steps):
            for name, (x, y, wide, high, _, words, *_) in step.things.items():
                where = f"{name!r} in step {number} at {width} pixels"
                assert x >= 0 and x + wide <= width, where
                assert y >= 0 and y + high <= scene.height, where
                assert not words or text_width(words, SMALLEST_PX) <= wide and high >= SMALLEST_PX, where


def check_lines(scene, width):
    """Raises AssertionError where the edge of a drawing cuts a line around a box: half of it is outside of the box."""
    drawn = ElementTree.fromstring(f"<svg>{scene.canvas.drawing()}</svg>").iter("rect")
    boxes = [(float(box.get("x", 0)), float(box.get("width")), "still") for box in drawn if box.get("stroke")]
    moving = [(name, thing) for step in scene.steps for name, thing in step.things.items() if thing.ink in LINES]
    for x, wide, name in [*boxes, *((thing.x, thing.width, name) for name, thing in moving)]:
        assert 0.5 <= x and x + wide <= width - 0.5, f"{name!r} at {width} pixels"


def collisions(step, *inks):
    """Names of things of these inks that lie on one another without lying in the same place."""
    seen = [(name, thing) for name, thing in step.things.items() if thing.ink in inks and thing.seen]
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


def words_of(svg):
    """(words, left, top, right, bottom) of all words of a drawing, about where they are."""

    def walk(element, inherited):
        own = inherited | element.attrib
        if element.tag.endswith("text") and element.text:
            size = float(own.get("font-size", 13))
            wide, x, y = text_width(element.text, size), float(own["x"]), float(own["y"])
            left = x - wide * {"middle": 0.5, "end": 1}.get(own.get("text-anchor"), 0)
            yield element.text, left, y - 0.72 * size, left + wide, y + 0.2 * size
        for child in element:
            yield from walk(child, own)

    return list(walk(ElementTree.fromstring(svg), {}))


def check_words(svg):
    """Raises AssertionError where words leave a drawing or lie on others."""
    *_, width, height = map(float, re.search(r'viewBox="([^"]*)"', svg)[1].split())
    found = words_of(svg)
    assert found, "no words"
    for words, left, top, right, bottom in found:
        assert left >= -1 and right <= width + 1 and top >= 0 and bottom <= height, words
    for (a, left, top, right, bottom), (b, x0, y0, x1, y1) in combinations(found, 2):
        assert right <= x0 + 0.5 or x1 <= left + 0.5 or bottom <= y0 or y1 <= top, (a, b)
