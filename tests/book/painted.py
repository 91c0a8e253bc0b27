"""What a figure has drawn: its paths as points on the picture, each with the paint of its group."""

import re
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

from book.figures.svg import Figure


class Drawn(NamedTuple):
    """A path: its lines, each a list of points, and its paint."""

    lines: list[list[tuple[float, float]]]
    paint: dict[str, str]
    tip: str = ""

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The least x and y, and the greatest, of all its points."""
        xs, ys = zip(*(point for line in self.lines for point in line), strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def middle(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


def parse(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", figure.svg))


def texts(figure: Figure) -> list[str]:
    """All words of a figure."""
    return [text.text for text in parse(figure).iter("text")]


def paths(figure: Figure, **paint: str) -> list[Drawn]:
    """The paths with this paint, from back to front: `stroke="comm"` for a colour of the palette."""
    found = []

    def walk(element: ElementTree.Element, inherited: dict[str, str]) -> None:
        own = inherited | element.attrib
        if element.tag == "path":
            found.append(Drawn(_points(element.get("d")), own, element.findtext("title", "")))
        for child in element:
            walk(child, own)

    walk(parse(figure), {})
    wanted = {key.replace("_", "-"): value for key, value in paint.items()}
    return [
        path
        for path in found
        if all(
            path.paint.get(k) == v or path.paint.get(k, "").startswith(f"var(--pbh-{v},") for k, v in wanted.items()
        )
    ]


def _points(path: str) -> list[list[tuple[float, float]]]:
    """The ends of all that a path consists of; its start is absolute and all else relative to where the pen is."""
    lines, x, y = [], 0.0, 0.0
    for letter, numbers in re.findall(r"([Mlqc])([^Mlqcz]*)", path):
        values = [float(number) for number in numbers.split()]
        x, y = (values[-2], values[-1]) if letter == "M" else (x + values[-2], y + values[-1])
        if letter == "M":
            lines.append([])
        lines[-1].append((round(x, 1), round(y, 1)))
    return lines
