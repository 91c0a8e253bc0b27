"""What holds of every drawing: it stays inside and its words fit; one of a mechanism is short enough to be played."""

import re
from itertools import combinations
from xml.etree import ElementTree

from book.figures.player import NARROW, WIDE
from book.figures.svg import SMALLEST_PX, text_width

HIGHEST = {WIDE: 420, NARROW: 520}  # pixels
LINES = ("outline", "frame", "bad")


def check_drawing(player):
    """Raises AssertionError where it is too long to be played, a thing leaves the drawing, or its words the thing."""
    assert 5 <= len(player.sentences) <= 14
    assert max(map(len, player.sentences)) <= 120, max(player.sentences, key=len)
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
    """(scene, its width, words that say where, thing) for everything in each step."""
    for scene, width in zip(player.scenes, (WIDE, NARROW), strict=True):
        for number, step in enumerate(scene.steps):
            for name, thing in step.things.items():
                yield scene, width, f"{name!r} in step {number} at {width} pixels", thing


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
