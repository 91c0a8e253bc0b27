"""A canvas: shapes, words and tips are put on it, and it becomes a figure.

The problem: a picture is computed from left to right and seen from back to front, and a thousand bars that each name
their colour make a page large. The idea: layers. Things put on the canvas itself are at the bottom, in order. A layer
is above it, gives its attributes to everything put on it, and is made on first use.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from html import escape

from book.figures.svg import (
    FONT,
    OUTLINE,
    READABLE_PX,
    SMALLEST_PX,
    WRONG,
    Figure,
    color,
    lines_of,
    num,
    tag,
    text_width,
)

# (name of a colour, words); `idle` is hatched, `outline` a dashed frame, `bad` a red one, `track` a thin bar, "" words
# alone
Legend = Iterable[tuple[str, str]]
BARS, FRAMES, WORDS = 1, 2, 9  # levels, from back to front


class Layer:
    """Shapes and words, in the order in which they come, that share attributes such as a fill."""

    def __init__(self, **attributes: object) -> None:
        self._attributes, self._drawn = attributes, []

    def __str__(self) -> str:
        drawn = "".join(self._drawn)
        return tag("g", drawn, **self._attributes) if self._attributes else drawn

    def rect(
        self, x: float, y: float, width: float, height: float, tip: str = "", radius: float = 2, **paint: object
    ) -> None:
        """A rectangle with rounded corners, and `tip` as the words that the mouse finds on it."""
        place = {"x": float(x), "y": float(y), "width": float(max(width, 0.8)), "height": float(height)}
        title = tag("title", escape(tip)) if tip else ""
        self._drawn.append(tag("rect", title, **place, rx=float(radius), **paint))

    def text(self, x: float, y: float, words: str, anchor: str = "", **paint: object) -> None:
        """Words at a point; `anchor` is `middle`, `end` or empty."""
        paint = {"text_anchor": anchor, **paint} if anchor else paint
        self._drawn.append(tag("text", escape(words), x=float(x), y=float(y), **paint))

    def path(self, path: str, fill: str = "none", tip: str = "", href: str = "", **paint: object) -> None:
        """A line, or with a `fill` an area; the path as SVG writes it. A click on it opens `href`."""
        drawn = tag("path", tag("title", escape(tip)) if tip else "", d=path, fill=fill, **paint)
        self._drawn.append(tag("a", drawn, href=escape(href), aria_label=escape(tip)) if href else drawn)

    def dashes(self, dashes: Iterable[tuple[float, float, float]], **paint: object) -> None:
        """Level lines (x, y, length) as one path, each relative to the one before: so a thousand take few bytes."""
        written, x, y = "", 0.0, 0.0
        for *start, long in dashes:
            across, down = (round(end, 1) for end in start)
            move = f"m{num(across - x)} {num(down - y)}" if written else f"M{num(across)} {num(down)}"
            x, y = round(across + long, 1), down
            written += f"{move}h{num(x - across)}"
        self.path(written, **paint)

    def arrow(self, path: str, x: float, y: float, to_left: bool = False) -> None:
        """A line, and the tip of its arrow at (x, y), which points to the right or to the left."""
        self.path(path, stroke=color("text"), stroke_width=1.5)
        self.path(f"M{num(x)} {num(y)}l{7 if to_left else -7} -4v8z", fill=color("text"))


class Canvas(Layer):
    """The layer at the bottom, with those above it.

    Args:
        alt: the sentence that you would say about the picture on the phone.
    """

    def __init__(self, alt: str) -> None:
        super().__init__()
        self._alt, self._layers, self._is_hatched = alt, {}, False
        self._idle = "hatched-" + hashlib.sha256(alt.encode()).hexdigest()[:8]  # equal pictures stay equal

    @property
    def hatched(self) -> str:
        """The fill of idle time."""
        self._is_hatched = True
        return f"url(#{self._idle})"

    def layer(self, level: int, **attributes: object) -> Layer:
        """The layer with these attributes; a higher level is in front."""
        return self._layers.setdefault((level, *attributes.items()), Layer(**attributes))

    def bars(self, name: str) -> Layer:
        """Where bars of a colour of the palette are put."""
        return self.layer(BARS, fill=color(name, True))

    def words_on(self, name: str) -> Layer:
        """Where centred words on bars of that colour are put; a rim of it keeps lines off the letters."""
        idle = name == "idle"
        return self.layer(
            WORDS,
            fill=color("text" if idle else f"on-{name}"),
            stroke=color(name, not idle),
            stroke_width=2.4,
            stroke_linejoin="round",
            paint_order="stroke",
            font_size=SMALLEST_PX,
            font_weight=600,
            text_anchor="start" if idle else "middle",
        )

    def note(self, x: float, y: float, words: str, anchor: str = "") -> None:
        """Small words in a soft colour: a number at an axis, a size below a matrix."""
        self.layer(BARS, fill=color("soft"), font_size=SMALLEST_PX).text(x, y, words, anchor)

    def title(self, words: str, width: float = math.inf) -> float:
        """In as many lines as it takes; returns the height of the lines after the first."""
        lines = lines_of(words, width)
        for i, line in enumerate(lines):
            self.text(0, 15 + 17 * i, line, font_weight=650)
        return 17.0 * (len(lines) - 1)

    def head(self, title: str, legend: Legend, left: float, width: float) -> float:
        """Title, then a legend that begins at `left`; returns the height that they take."""
        x, y = left, 25.0 + self.title(title, width)
        for name, words in legend:
            step = (17 if name else 0) + text_width(words)
            if x + step > width and x > left:
                x, y = left, y + 19
            if not name:  # a remark, away from the colours
                x = max(x, width - step)
            if name == "track":
                self.rect(x, y + 7, 12, 5, radius=1, fill=color("soft"))
            elif name == "outline":
                self.rect(x, y, 12, 12, fill="none", **OUTLINE)
            elif name == "bad":
                self.rect(x + 1, y + 1, 10, 10, fill="none", **WRONG)
            elif name == "idle":
                self.rect(x, y, 12, 12, fill=self.hatched, stroke=color("rule"))
            elif name:
                self.rect(x, y, 12, 12, fill=color(name, True))
            (self.text if name else self.note)(x + step - text_width(words), y + 11, words)
            x += step + 12
        return y + 25

    def figure(self, width: float, height: float, caption: str = "") -> Figure:
        """Everything put on it. Its words are never shown smaller than 12 px."""
        least, most = width * READABLE_PX / SMALLEST_PX, width * 1.15
        style = f"display:block;width:100%;height:auto;min-width:{least:.0f}px;max-width:{most:.0f}px"
        body = self.drawing()
        picture = tag(
            "svg",
            body,
            xmlns="http://www.w3.org/2000/svg",
            role="group" if "<a " in body else "img",  # an image would hide its links from screen readers
            aria_label=escape(self._alt),
            viewBox=f"0 0 {num(width)} {num(height)}",
            fill=color("text"),
            font_family=FONT,
            font_size=13,
            style=f"{style};font-variant-numeric:tabular-nums",
        )
        return Figure(picture, self._alt, caption)

    def drawing(self) -> str:
        """Everything put on it, from back to front, without a frame around it."""
        levels = sorted(self._layers.items(), key=lambda item: item[0][0])
        drawing = [self._hatch()] if self._is_hatched else []
        return "".join([*drawing, str(self), *(str(layer) for _, layer in levels)])

    def _hatch(self) -> str:
        stripe = tag("path", d="M0 0V6", stroke=color("idle-line"), stroke_width=2)
        tile = tag("rect", width=6, height=6, fill=color("idle")) + stripe
        size = {"width": 6, "height": 6, "patternTransform": "rotate(45)", "patternUnits": "userSpaceOnUse"}
        return tag("defs", tag("pattern", tile, id=self._idle, **size))
