"""A drawing of the book as pixels, for those who show a PNG but no SVG.

The problem: whoever passes on a link shows a PNG. The book's drawings are SVG in colours of a stylesheet, and where the
pages are built there is no browser. A library that reads SVG would be a native one, and know no CSS variables.
The idea: a drawing is rectangles, paths and words (`canvas.py`), so matplotlib draws it; fontTools reads the paths. A
player's things look as the player's own stylesheet says. Anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from fontTools.pens.recordingPen import RecordingPen
from fontTools.svgLib.path import parse_path
from matplotlib.figure import Figure as Sheet
from matplotlib.patches import BoxStyle, FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from book.figures.svg import variables

FONT, WIDER = "DejaVu Sans", 1.08  # matplotlib brings it, so a card is the same everywhere; it is wider than a page's
_VARIABLE = re.compile(r"var\((--pbh-[\w-]+),(?:[^()]|\([^()]*\))*\)")
_DRAWING = re.compile("<svg.*?</svg>", re.DOTALL)
_RULE = re.compile(r"(?<! )\.pbh-thing(?:\[data-ink=([\w-]+)\])? (rect|text)\{([^}]*)\}")
_MOVE = re.compile(r"translate\((-?[\d.]+)px, (-?[\d.]+)px\)")
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}

_CODES = {"moveTo": Path.MOVETO, "lineTo": Path.LINETO, "curveTo": Path.CURVE4, "qCurveTo": Path.CURVE3}
_CODES["closePath"] = Path.CLOSEPOLY

Look = Mapping[str, str]  # attribute or CSS property to value


def draw(figure: str, sheet: Sheet, room: tuple[float, float, float, float]) -> None:
    """Draw a figure of the book, still, light and as for a phone, in the middle of a room on a sheet.

    Args:
        figure: the HTML of a `Figure`, a player or an Explorer.
        sheet: of matplotlib, 72 dots per inch: a pixel is a point.
        room: left, top, width and height, in pixels from the upper left corner of the sheet.

    Raises:
        ValueError: an element that drawings of the book do not have.
    """
    light = _VARIABLE.sub(lambda match: variables("light")[match[1]], figure)
    svg = ElementTree.fromstring(_DRAWING.findall(light)[:2][-1])  # wide, then narrow
    x, y, *size = map(float, svg.attrib["viewBox"].split())
    left, top, *most = room
    scale = min(have / need for have, need in zip(most, size, strict=True))
    corner = (start + (have - scale * need) / 2 for start, have, need in zip((left, top), most, size, strict=True))
    place = Affine2D().translate(-x, -y).scale(scale).translate(*corner).scale(1, -1).translate(0, sheet.bbox.height)
    rules = {(ink, name): rule for ink, name, rule in _RULE.findall(light)}
    _Brush(svg, rules, sheet, scale).draw(svg, {}, place, 1.0)


class _Brush:
    """Draws the elements of one SVG.

    Args:
        rules: what a stylesheet says: ink of a thing ("" for all) and element, to properties.
        scale: pixels of the sheet for one of the SVG.
    """

    def __init__(
        self, svg: ElementTree.Element, rules: Mapping[tuple[str, str], str], sheet: Sheet, scale: float
    ) -> None:
        self._rules, self._sheet, self._scale = rules, sheet, scale
        self._tiles = {f"url(#{tile.attrib['id']})": tile for tile in svg.iter() if _name(tile) == "pattern"}

    def draw(self, element: ElementTree.Element, given: Look, place: Affine2D, seen: float) -> None:
        """Draw an element, which looks as `given` by those around it unless it says otherwise, and those in it."""
        name = _name(element)
        rules = [self._rules.get((ink, name), "") for ink in ("", given["data-ink"])] if "data-ink" in given else []
        styles = ";".join([*rules, element.attrib.get("style", "")]).split(";")
        own = {key.strip(): value.strip() for key, _, value in (style.partition(":") for style in styles)}
        look = {**given, **element.attrib, **own}
        if move := _MOVE.fullmatch(own.get("transform", "")):
            place = Affine2D().translate(*map(float, move.groups())) + place
        seen *= float({**element.attrib, **own}.get("opacity", 1))
        if name in ("title", "defs") or not seen:
            return
        if name in ("svg", "g", "a"):
            for inner in element:
                self.draw(inner, look, place, seen)
        elif name == "rect":
            self._shape(_box(look), look, place, seen)
        elif name == "path":
            self._shape(_outline(look["d"]), look, place, seen)
        elif name == "text":
            self._words(element.text or "", look, place, seen)
        else:
            raise ValueError(f"a drawing has a <{name}>; only rect, path and text can be made a PNG")

    def _shape(self, shape: Patch, look: Look, place: Affine2D, seen: float) -> None:
        fill, stroke = look.get("fill", "black"), look.get("stroke", "none")
        width = self._long(look, "stroke-width", 1)
        if tile := self._tiles.get(fill):
            paper, stripe = (part.attrib for part in tile)
            shape.set(hatch="/", edgecolor=stripe["stroke"], linewidth=0)  # one each 8.5 pixels, at any scale
            shape.set_hatch_linewidth(2.8)  # a third of them, as in the SVG
            fill = paper["fill"]
        elif stroke != "none":
            dashes = [float(dash) * self._scale / width for dash in look.get("stroke-dasharray", "").split()]
            shape.set(edgecolor=stroke, linewidth=width, linestyle=(0, dashes or None))
            shape.set(joinstyle=look.get("stroke-linejoin", "miter"), capstyle="butt")
        else:
            shape.set(linewidth=0, edgecolor="none")
        seen = seen * float(look.get("fill-opacity", 1))
        self._sheet.add_artist(shape)
        shape.set(facecolor=fill, alpha=seen, transform=place, clip_on=False)

    def _words(self, words: str, look: Look, place: Affine2D, seen: float) -> None:
        size = self._long(look, "font-size", 13)
        x, y = place.transform((float(look.get("x", 0)), float(look.get("y", 0))))
        if look.get("dominant-baseline") == "central":
            y -= 0.35 * size
        weight = "bold" if int(look.get("font-weight", 400)) >= 600 else "normal"
        text = Text(x, y, words, color=look["fill"], alpha=seen, family=FONT, size=size / WIDER, weight=weight)
        text.set(ha=_ANCHORS[look.get("text-anchor") or "start"], va="baseline", parse_math=False)
        if look.get("paint-order") == "stroke":
            text.set_path_effects(
                [withStroke(linewidth=self._long(look, "stroke-width", 1), foreground=look["stroke"])]
            )
        self._sheet.add_artist(text)
        text.set_transform(None)

    def _long(self, look: Look, name: str, default: float) -> float:
        return self._scale * float(look.get(name, f"{default}").removesuffix("px"))


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _box(look: Look) -> FancyBboxPatch:
    x, y, width, height = (float(look.get(key, "0").removesuffix("px")) for key in ("x", "y", "width", "height"))
    radius = min(float(look.get("rx", 0)), width / 2, height / 2)
    return FancyBboxPatch((x, y), width, height, BoxStyle("Round", pad=0, rounding_size=radius))


def _outline(path: str) -> PathPatch:
    parse_path(path, pen := RecordingPen())
    steps = [(points or [(0, 0)], _CODES[step]) for step, points in pen.value if step != "endPath"]
    return PathPatch(Path([point for points, _ in steps for point in points], [c for p, c in steps for _ in p]))
