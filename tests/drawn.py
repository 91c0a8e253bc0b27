"""What holds of every drawing of a mechanism: it stays inside, its words fit, and it is short enough to be played."""

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
