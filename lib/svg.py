"""The book's one palette, and small helpers to write SVG by hand.

The problem: a colour that means "backward" in one chapter and "communication" in the next teaches the wrong thing.
And a plotting library's SVG weighs 20 KB, changes at every run and is lost in dark mode.
The idea: every colour has one meaning and one name, written as a CSS variable with a fallback
(`var(--pbh-forward, #8ecae6)`). The book's stylesheet sets the variables, light and dark; `python -m lib.plot` prints
them. Where there is no stylesheet (Colab, JupyterLab) words and idle time take the colour of the text around them.
Figures are rectangles, lines and words, so we write them as text; lengths are pixels of the view box.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

PAPER = {"light": "#ffffff", "dark": "#12161c"}  # the page behind the figures
PALETTE = {  # name: (light, dark)
    "forward": ("#8ecae6", "#5fa8cf"),
    "backward": ("#0b5cad", "#2f74c0"),
    "weight": ("#1b7f5c", "#2c8f6b"),
    "comm": ("#e08e00", "#e8a33d"),
    "param": ("#0b5cad", "#3f87d6"),
    "opt": ("#8c4888", "#b06ca4"),
    "idle": ("#eef1f4", "#1f2630"),
    "idle-line": ("#d5dbe1", "#2f3946"),
    "ok": ("#1b7f5c", "#58c79b"),
    "bad": ("#b3261e", "#f2776b"),
    "text": ("#1b1f24", "#e6e9ee"),
    "soft": ("#57606a", "#a3adba"),
    "rule": ("#d8dee4", "#2c343f"),
    "panel": ("#f6f8fa", "#1a2029"),
    "accent": ("#0b5cad", "#7db8f0"),
}
FILLS = ("forward", "backward", "weight", "comm", "param", "opt", "soft")  # these carry words
FALLBACK = {  # without a stylesheet these follow the surrounding text, so that dark notebooks stay readable
    "text": "currentColor",
    "soft": "currentColor",
    "idle": "color-mix(in srgb, currentColor 6%, transparent)",
    "idle-line": "color-mix(in srgb, currentColor 18%, transparent)",
    "rule": "color-mix(in srgb, currentColor 20%, transparent)",
    "panel": "color-mix(in srgb, currentColor 4%, transparent)",
}
FONT = "Inter, 'Helvetica Neue', Arial, 'Noto Sans', sans-serif"
SMALLEST_PX = 12.5  # no text in a figure is smaller than this, in view box pixels
READABLE_PX = 12.0  # and none is shown smaller than this: below, the figure scrolls inside its own box


def contrast(one: str, other: str) -> float:
    """WCAG contrast of two `#rrggbb` colours, 1 to 21; text needs 4.5."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def variables(mode: str) -> dict[str, str]:
    """CSS variable to colour for `mode`, `light` or `dark`; `--pbh-on-X` is the colour of words on a fill of X."""
    index = ("light", "dark").index(mode)
    colors = {f"--pbh-{name}": pair[index] for name, pair in PALETTE.items()}
    for name in FILLS:
        colors[f"--pbh-on-{name}"] = max("#ffffff", "#07131b", key=lambda ink: contrast(ink, PALETTE[name][index]))
    return colors


def css() -> str:
    """The variables as the book's stylesheet must have them: a light block and a dark block."""

    def block(selector: str, mode: str) -> str:
        return selector + " {\n" + "".join(f"  {k}: {v};\n" for k, v in variables(mode).items()) + "}\n"

    return block(":root", "light") + block('html[data-theme="dark"]', "dark")


def color(name: str, fill: bool = False) -> str:
    """The CSS colour of a name of the palette. `fill=True` for a bar: its fallback is a fixed colour."""
    light = variables("light")[f"--pbh-{name}"]
    return f"var(--pbh-{name}, {light if fill else FALLBACK.get(name, light)})"


HATCHED = "url(#idle-here)"
OUTLINE = f'stroke="{color("text")}" stroke-width="1.4" stroke-dasharray="5 2.5"'


@dataclass(frozen=True, repr=False)
class Figure:
    """A picture as the last expression of a cell.

    Args:
        svg: the drawing, one `<svg>` element.
        alt: the sentence that you would say about it on the phone; screen readers and plain text get it.
        caption: what to see in it, or empty.
    """

    svg: str
    alt: str
    caption: str = ""

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        box = '<div class="pbh-scroll" role="group" tabindex="0" aria-label="figure" style="overflow-x:auto">'
        style = f"margin:.8em 0 0;font:14px/1.5 {FONT};color:var(--pbh-soft, inherit)"
        caption = f'<figcaption style="{style}">{escape(self.caption)}</figcaption>' if self.caption else ""
        return f'<figure class="pbh-figure" style="margin:1.2em 0">{box}{self.svg}</div>{caption}</figure>'


def document(body: Sequence[str], width: float, height: float, alt: str) -> str:
    """The `<svg>` element around `body`. Its text never shrinks below 12 px."""
    drawing = "".join(body)
    identity = "idle-" + hashlib.sha256(drawing.encode()).hexdigest()[:8]  # not random: equal drawings stay equal
    drawing = drawing.replace("idle-here", identity)
    least, most = width * READABLE_PX / SMALLEST_PX, width * 1.15
    style = f"display:block;width:100%;height:auto;min-width:{least:.0f}px;max-width:{most:.0f}px"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" '
        f'viewBox="0 0 {num(width)} {num(height)}" fill="{color("text")}" font-family="{FONT}" font-size="13" '
        f'style="{style};font-variant-numeric:tabular-nums">{drawing}</svg>'
    )


def hatch() -> str:
    """Defines the hatched fill `HATCHED` of idle time; `document` gives it a name of its own on the page."""
    return (
        '<defs><pattern id="idle-here" width="6" height="6" patternTransform="rotate(45)" '
        f'patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="{color("idle")}"/>'
        f'<path d="M0 0V6" stroke="{color("idle-line")}" stroke-width="2"/></pattern></defs>'
    )


def num(value: float) -> str:
    """A length with at most one decimal, as short as it can be written: `12`, `0.5`."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def rect(x: float, y: float, width: float, height: float, fill: str = "", tip: str = "", radius: float = 2) -> str:
    """A rectangle with rounded corners, and `tip` as the words that the mouse finds on it."""
    shape = f'<rect x="{num(x)}" y="{num(y)}" width="{num(max(width, 0.8))}" height="{num(height)}"'
    shape += f' rx="{num(radius)}"' + (f' fill="{fill}"' if fill else "")
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else shape + "/>"


def text(x: float, y: float, words: str, anchor: str = "", **attributes: object) -> str:
    """Words at a point; `anchor` is `middle`, `end` or empty; `font_size=13` becomes `font-size="13"`."""
    extra = f' text-anchor="{anchor}"' if anchor else ""
    extra += "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{num(x)}" y="{num(y)}"{extra}>{escape(words)}</text>'


def text_width(words: str, size: float = 13) -> float:
    """About how wide `words` are, a little more rather than less: 0.6 em a character."""
    return 0.6 * size * len(words)


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`, at most `most` of them."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"an axis from {low:g} to {high:g} has no length; give two different finite numbers")
    power = 10 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [round(k * step, 12) for k in range(first, last + 1)]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places for labels, at least `gap` apart and as near as can be to the `wanted` ones, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[float]] = []  # each group: [sum of (wanted - its offset), members]
    for i in order:
        groups.append([wanted[i], 1])
        while len(groups) > 1 and groups[-1][0] / groups[-1][1] < groups[-2][0] / groups[-2][1] + gap * groups[-2][1]:
            total, members = groups.pop()
            groups[-1] = [groups[-1][0] + total - gap * groups[-1][1] * members, groups[-1][1] + members]
    places = [total / members + gap * k for total, members in groups for k in range(int(members))]
    return [place for _, place in sorted(zip(order, places, strict=True))]


def head(title: str, legend: Iterable[tuple[str, str]], left: float, width: float) -> tuple[list[str], float]:
    """Title, then a legend of (fill, words); the fill `outline` is a dashed frame. Also the height they take."""
    out, x, y = [text(0, 15, title, font_weight=650)], left, 25.0
    for fill, words in legend:
        step = 17 + text_width(words)
        if x + step > width and x > left:
            x, y = left, y + 19
        paint = f'fill="none" {OUTLINE}' if fill == "outline" else f'fill="{fill}"'
        paint += f' stroke="{color("rule")}"' if fill == HATCHED else ""
        out.append(f'<rect x="{num(x)}" y="{num(y)}" width="12" height="12" rx="2" {paint}/>')
        out.append(text(x + 17, y + 11, words))
        x += step + 12
    return out, y + 25


def axis(left: float, right: float, y: float, low: float, high: float, name: str) -> tuple[list[str], float]:
    """A horizontal axis at height `y` with round ticks and its name (with its unit); also the height it takes."""
    marks = [(left + (t - low) / (high - low) * (right - left), f"{t:g}") for t in ticks(low, high, 9)]
    path = f"M{num(left)} {num(y)}H{num(right)}" + "".join(f"M{num(x)} {num(y)}v4" for x, _ in marks)
    words = "".join(text(x, y + 17, label) for x, label in marks)
    x, label = marks[-1]
    beside = x + text_width(label, SMALLEST_PX) / 2 + 10 <= right - text_width(name, SMALLEST_PX)
    out = [
        f'<path d="{path}" fill="none" stroke="{color("soft")}"/>',
        f'<g fill="{color("soft")}" font-size="{SMALLEST_PX}" text-anchor="middle">{words}</g>',
        text(right, y + (17 if beside else 34), name, "end", fill=color("soft"), font_size=SMALLEST_PX),
    ]
    return out, 22 if beside else 39


def stretches(left: float, right: float, y: float, top: float, names: Sequence[str]) -> tuple[list[str], float]:
    """A horizontal axis in equal stretches with names, and lines up to `top` between them; also the height it takes."""
    ends = [left + (right - left) * i / len(names) for i in range(len(names) + 1)]
    path = f"M{num(left)} {num(y)}H{num(right)}" + "".join(f"M{num(x)} {num(y)}V{num(top)}" for x in ends[1:-1])
    words = "".join(text((a + b) / 2, y + 17, name) for a, b, name in zip(ends, ends[1:], names, strict=False))
    return [
        f'<path d="{path}" fill="none" stroke="{color("soft")}"/>',
        f'<g fill="{color("soft")}" font-size="{SMALLEST_PX}" text-anchor="middle">{words}</g>',
    ], 22


def levels(left: float, right: float, heights: Iterable[tuple[float, float]]) -> list[str]:
    """Horizontal grid lines at (height in pixels, value), with the value at the left of each."""
    heights = list(heights)
    grid = "".join(f"M{num(left)} {num(y)}H{num(right)}" for y, _ in heights)
    labels = "".join(text(left - 8, y + 4.5, f"{value:g}") for y, value in heights)
    return [
        f'<path d="{grid}" fill="none" stroke="{color("rule")}"/>',
        f'<g fill="{color("soft")}" font-size="{SMALLEST_PX}" text-anchor="end">{labels}</g>',
    ]


def words_on(name: str, words: Iterable[str]) -> str:
    """A group of centred words on bars of the colour `name`; a rim of that colour keeps lines off the letters."""
    ink, rim = ("text", color("idle")) if name == "idle" else (f"on-{name}", color(name, True))
    style = f'font-size="{SMALLEST_PX}" font-weight="600" text-anchor="{"start" if name == "idle" else "middle"}"'
    rim = f'stroke="{rim}" stroke-width="2.4" stroke-linejoin="round" paint-order="stroke"'
    return f'<g fill="{color(ink)}" {rim} {style}>{"".join(words)}</g>'


def dot(x: float, y: float) -> str:
    """A circle where something was measured."""
    ink = f'fill="{color("panel")}" stroke="{color("text")}" stroke-width="1.6"'
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="4" {ink}/>'


def stack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each (start, end) the lowest row in which it overlaps no other."""
    ends: list[float] = []
    rows = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[i]
        rows[i] = next((k for k, busy in enumerate(ends) if busy <= start + 1e-9), len(ends))
        ends[rows[i] : rows[i] + 1] = [end]
    return rows
