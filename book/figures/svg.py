"""The book's one palette, and how SVG is written by hand.

The problem: a colour that means "backward" in one chapter and "communication" in the next teaches the wrong thing.
The idea: every colour has one meaning and one name, written as a CSS variable with a fallback
(`var(--pbh-forward, #8ecae6)`). The book's stylesheet sets the variables, light and dark; `python -m book.figures.svg`
prints them. Where there is no stylesheet (Colab, JupyterLab) words and idle time take the colour of the text around
them. Figures are rectangles, lines and words, so they are written as text (`canvas.py`), also where matplotlib computes
them (`plot.py`); lengths are pixels of the view box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, wraps
from html import escape

PAPER = {"light": "#ffffff", "dark": "#12161c"}  # the background of the figures
PALETTE = {  # name: (light, dark)
    "forward": ("#8ecae6", "#5fa8cf"),
    "backward": ("#0b5cad", "#2f74c0"),
    "weight": ("#2b9a72", "#2b9a72"),
    "comm": ("#e08e00", "#e8a33d"),
    "param": ("#263037", "#5c6970"),
    "gradient": ("#eea1a5", "#dda1ab"),
    "activation": ("#f5dd8a", "#ffee88"),
    "opt": ("#8c4888", "#b06ca4"),
    "rank-0": ("#2391b0", "#63cfd2"),  # whose data it is, where a picture is about that
    "rank-1": ("#7d4a2a", "#b0713c"),
    "rank-2": ("#8f9430", "#cfd35c"),
    "rank-3": ("#6c5fc7", "#8a80ea"),
    "series-0": ("#37474f", "#c7d3dc"),  # of a plot: schedules, processes, what others published
    "series-1": ("#6f8ba3", "#8fa9bf"),
    "series-2": ("#8a7358", "#b8a58c"),
    "series-3": ("#86708f", "#b9a6c2"),
    "series-4": ("#648a7a", "#93b8a8"),
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
# These carry words.
RANKS = tuple(f"rank-{rank}" for rank in range(4))
FILLS = ("forward", "backward", "weight", "comm", "param", "gradient", "activation", "opt", "soft", *RANKS)
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
READABLE_PX = 12.0  # and none is shown smaller than this
WIDE, NARROW = 680.0, 340.0  # pixels that a drawing has on a page and on a phone

_LENGTHS = ("x", "y", "width", "height", "rx", "cx", "cy")  # one decimal is enough of these


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


@cache
def color(name: str, fill: bool = False) -> str:
    """The CSS colour of a name of the palette. `fill=True` for a bar: its fallback is a fixed colour."""
    light = variables("light")[f"--pbh-{name}"]
    return f"var(--pbh-{name}, {light if fill else FALLBACK.get(name, light)})"


WRONG = {"stroke": color("bad"), "stroke_width": 2.5}  # the frame around something that is not right
OUTLINE = {"stroke": color("text"), "stroke_width": 1.4, "stroke_dasharray": "5 2.5"}

# For matplotlib, which takes no names: a colour says which one of the palette it is, and dashes count in widths.
INK = {name: f"#0000{i:02x}" for i, name in enumerate(PALETTE)}
DASHED = {"color": INK["soft"], "linewidth": 1.5, "linestyle": (0, (4.7, 2.7))}


@dataclass(frozen=True, repr=False)
class Figure:
    """A picture as the last expression of a cell.

    Args:
        svg: the drawing, one `<svg>` element.
        narrow: the same, drawn for a phone; or empty, if it fits there as it is.
        alt: the sentence that you would say about it on the phone; screen readers and plain text get it.
        caption: the result that it shows, or empty.
    """

    svg: str
    alt: str
    caption: str = ""
    narrow: str = ""

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        style = f"margin:.8em 0 0;font:14px/1.5 {FONT};color:var(--pbh-soft, inherit)"
        caption = f'<figcaption style="{style}">{escape(self.caption)}</figcaption>' if self.caption else ""
        drawing = in_box(self.svg, self.narrow or self.svg, "group", "figure")
        return f'<figure class="pbh-figure" style="margin:1.2em 0">{drawing}{caption}</figure>'


_BOX = (
    "<style>.pbh-box{overflow-x:auto;container-type:inline-size}.pbh-box .pbh-narrow{display:none}"
    f"@container (max-width:{WIDE * READABLE_PX / SMALLEST_PX:g}px){{"
    ".pbh-box .pbh-wide{display:none}.pbh-box .pbh-narrow{display:block}}</style>"
)


def in_box(wide: str, narrow: str, role: str, name: str) -> str:
    """Two drawings of the same in a box, which shows the drawing that it has room for."""
    both = f'<div class="pbh-wide">{wide}</div><div class="pbh-narrow">{narrow}</div>'
    return f'{_BOX}<div class="pbh-box" role="{role}" tabindex="0" aria-label="{name}">{both}</div>'


def drawn_twice(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """For a function with a `width`: its figure also has the drawing for a phone."""

    @wraps(draw)
    def twice(*args: object, **kwargs: object) -> Figure:
        narrow = draw(*args, **{**kwargs, "width": NARROW}).svg
        return replace(draw(*args, **kwargs), narrow=narrow.replace("hatched-", "narrow-hatched-"))  # their ids

    return twice


def num(value: float) -> str:
    """A length with at most one decimal, as short as it can be written: `12`, `0.5`."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element; `font_size=13` becomes `font-size="13"`, and a length is written short."""

    def written(key: str, value: object) -> str:
        return num(value) if isinstance(value, float) and key in _LENGTHS else f"{value}"

    opening = name + "".join(f' {key.replace("_", "-")}="{written(key, x)}"' for key, x in attributes.items())
    return f"<{opening}>{content}</{name}>" if content else f"<{opening}/>"


def text_width(words: str, size: float = 13) -> float:
    """About how wide `words` are, a little more rather than less: 0.6 em a character, 0.72 a capital."""
    return size * (0.6 * len(words) + 0.12 * sum(map(str.isupper, words)))


def lines_of(words: str, width: float, size: float = 13) -> list[str]:
    """The words in as many lines as it takes."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if text_width(longer, size) <= width else [*lines, word]
    return lines


if __name__ == "__main__":
    print(css(), end="")
