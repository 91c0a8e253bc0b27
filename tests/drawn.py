"""What holds of every drawing of a mechanism: it stays inside, its words fit, and it is short enough to be played."""

import re
from xml.etree import ElementTree

from lib.figures.player import NARROW, WIDE
from lib.figures.svg import SMALLEST_PX, text_width

HIGHEST = {WIDE: 420, NARROW: 520}  # pixels
LINES = ("outline", "frame", "bad")


def check_drawing(player):
    """Raises AssertionError where a thing leaves the drawing, or its words leave the thing."""
    assert 5 <= len(player.sentences) <= 14
    assert all(len(sentence) <= 120 for sentence in player.sentences), max(player.sentences, key=len)
    for scene, width in zip(player.scenes, (WIDE, NARROW), strict=True):
        assert scene.height <= HIGHEST[width]
        for number, step in enumerate(scene.steps):
            for name, (x, y, wide, high, ink, words, *_) in step.things.items():
                where = f"{name!r} in step {number} at {width} pixels"
                edge = 0.5 if ink in LINES else 0  # half a line is outside of its box
                assert edge <= x and x + wide <= width - edge, where
                assert y >= 0 and y + high <= scene.height, where
                assert not words or text_width(words, SMALLEST_PX) <= wide and high >= SMALLEST_PX, where


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


def check_words(svg):
    """Raises AssertionError where words leave the picture, or lie on other words."""
    boxes = words_of(svg)
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    for i, (words, left, top, right, bottom) in enumerate(boxes):
        assert -0.1 <= left and right <= width + 0.1 and top >= 0 and bottom <= height, f"{words!r} at {left}, {top}"
        over = [b for b, *box in boxes[:i] if left < box[2] and box[0] < right and top < box[3] and box[1] < bottom]
        assert not over, f"{words!r} on {over}"


def words_of(svg):
    """(words, left, top, right, bottom) of each text of a drawing."""
    found = []

    def walk(element, inherited):
        own = inherited | element.attrib
        if element.tag == "text":
            size, x, y = (float(own[name]) for name in ("font-size", "x", "y"))
            wide = text_width(element.text, size)
            left = x - wide * {"middle": 0.5, "end": 1}.get(own.get("text-anchor"), 0)
            found.append((element.text, left, y - 0.75 * size, left + wide, y + 0.2 * size))
        for child in element:
            walk(child, own)

    walk(ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", svg)), {})
    return found
