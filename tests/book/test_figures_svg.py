"""The palette keeps its promises: contrast, colour blindness, stylesheet. And the pen draws what it should."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from book.figures import curves, svg
from lib.trace import stack

ROOT = Path(__file__).parents[2]
MODES = ("light", "dark")


# ---- The palette


@pytest.mark.parametrize("mode", MODES)
def test_words_on_fills_are_readable(mode):
    colors = svg.variables(mode)
    for name in svg.FILLS:
        assert svg.contrast(colors[f"--pbh-on-{name}"], colors[f"--pbh-{name}"]) >= 4.5, name


@pytest.mark.parametrize("mode", MODES)
def test_words_on_paper_are_readable(mode):
    colors = svg.variables(mode)
    paper = svg.PAPER[mode]
    for ink in ("text", "soft", "accent", "ok", "bad"):
        for ground in (paper, colors["--pbh-panel"]):
            assert svg.contrast(colors[f"--pbh-{ink}"], ground) >= 4.5, (ink, ground)
    for ground in ("idle", "idle-line"):  # "waits 3 ms" stands on the hatching
        assert svg.contrast(colors["--pbh-text"], colors[f"--pbh-{ground}"]) >= 4.5, ground


def test_contrast_is_that_of_wcag():
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert svg.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


# Machado, Oliveira, Fernandes 2009, severity 1: what a colour looks like without one kind of cone.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(color: str, matrix) -> tuple[float, float, float]:
    """CIE Lab of a colour as seen through `matrix`."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrix)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b)
    xyz += (0.0193 * r + 0.1192 * g + 0.9505 * b,)
    white = (0.9505, 1, 1.089)
    shares = (v / w for v, w in zip(xyz, white, strict=True))
    x, y, z = (s ** (1 / 3) if s > 0.008856 else 7.787 * s + 4 / 29 for s in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_neighbouring_colors_differ_for_everybody(mode, blindness):
    colors = svg.variables(mode)
    for together in (
        ("forward", "backward", "weight", "comm", "opt"),
        ("param", "gradient", "activation", "opt"),
        ("param", "comm", "opt", "forward", "backward", "weight", "gradient", "activation"),
        svg.RANKS,
        ("ok", "bad"),
    ):
        for pair in itertools.combinations(together, 2):
            one, other = (lab(colors[f"--pbh-{name}"], BLINDNESS[blindness]) for name in pair)
            # 2.3 is just visible. One man in twelve is blind to red or green, one person in ten thousand to blue.
            assert math.dist(one, other) > (10 if blindness == "tritan" else 15), pair


def declared(css: str) -> dict[str, dict[str, str]]:
    """The `--pbh-` variables that a stylesheet sets, for the light and for the dark page."""
    found: dict[str, dict[str, str]] = {"light": {}, "dark": {}}
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    for selector, block in re.findall(r"([^{}]*)\{([^{}]*)\}", css):
        mode = "dark" if "dark" in selector else "light"
        found[mode].update(re.findall(r"(--pbh-[\w-]+)\s*:\s*([^;}]+?)\s*(?:;|$)", block))
    return found


def test_stylesheet_has_the_palette():
    css = (ROOT / "book" / "static" / "book.css").read_text(encoding="utf-8")
    assert declared(css) == {mode: svg.variables(mode) for mode in MODES}
    assert f"--paper: {svg.PAPER['dark']}" in css


def test_module_prints_the_palette():
    printed = subprocess.run(
        [sys.executable, "-m", "book.figures.svg"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert declared(printed.stdout) == {mode: svg.variables(mode) for mode in MODES}


# ---- The pen


def test_labels_spread_and_keep_their_order():
    places = curves.spread([10, 11, 50, 10.5], 5)
    assert places[0] < places[3] < places[1] < places[2] == 50
    assert places[3] - places[0] >= 4.99 and places[1] - places[3] >= 4.99
    assert sum(places[:2] + places[3:]) == pytest.approx(31.5)  # moved no further than they must


def test_stack_uses_the_lowest_free_row():
    assert stack([(0, 10), (10, 20), (5, 12), (11, 30), (20, 21)]) == [0, 0, 1, 2, 0]
    assert stack([]) == []


def test_lengths_are_short_and_never_minus_zero():
    assert [svg.num(v) for v in (12, 12.04, 12.06, -0.01, 1e3)] == ["12", "12", "12.1", "0", "1000"]
