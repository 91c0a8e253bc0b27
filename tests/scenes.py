"""What every mechanism that one can play must keep to, whatever it shows."""

from lib.figures.player import NARROW, WIDE
from lib.figures.svg import SMALLEST_PX, text_width

HIGHEST = {WIDE: 420, NARROW: 520}  # pixels


def assert_well_drawn(player):
    """Few steps, short sentences; at both widths all things inside the drawing and all words inside their things."""
    assert 5 <= len(player.sentences) <= 14
    assert [s for s in player.sentences if len(s) > 120] == []
    for scene, width in zip(player.scenes, (WIDE, NARROW), strict=True):
        assert scene.height <= HIGHEST[width]
        for at, step in enumerate(scene.steps):
            for name, thing in step.things.items():
                where = f"{name} in step {at}, {width} pixels wide"
                assert 0 <= thing.x <= width - thing.width, where
                assert 0 <= thing.y <= scene.height - thing.height, where
                assert text_width(thing.words, SMALLEST_PX) <= thing.width, where


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
