"""Mechanisms that one can play: things that stay the same from step to step, and a sentence for each step.

The problem: a ring that turns or a bucket that fills is a motion, and in a row of stills the reader has to find each
thing again. An animation that starts without the reader cannot be read.
The idea: Python computes the place, the colour and the words of each thing in every step, from a real schedule or a
real collective. A few lines of JavaScript (`player.js`) put the things there; between two steps they glide. Nothing
moves before the reader presses Play, and all ends with the last step. Without a script, and on paper, one chosen step
is shown.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.in_page import as_json, caption, scripts
from book.figures.svg import FILLS, FONT, NARROW, SMALLEST_PX, WIDE, color, num

MOST_BYTES = 60_000

_SCRIPT = Path(__file__).with_name("player.js")
_INKS = "".join(
    f".pbh-thing[data-ink={name}] rect{{fill:{color(name, True)}}}"
    f".pbh-thing[data-ink={name}] text{{fill:{color(f'on-{name}')}}}"
    for name in FILLS
)
STYLE = f"""
.pbh-player{{margin:1.4em 0;padding:16px clamp(8px,2vw,18px);border-radius:10px;font:15px/1.5 {FONT};
  container-type:inline-size;background:{color("panel")};color:{color("text")};border:1px solid {color("rule")}}}
.pbh-player .pbh-title{{margin:0 0 10px;font-weight:650;font-size:15px}}
.pbh-player svg{{display:block;width:100%;height:auto;margin:auto}}
.pbh-player svg.pbh-narrow{{display:none}}
@container (max-width:600px){{.pbh-player svg.pbh-wide{{display:none}}.pbh-player svg.pbh-narrow{{display:block}}}}
.pbh-player figcaption{{display:grid;margin:10px 0 0;padding:0;font:15px/1.5 {FONT};color:{color("text")};
  text-align:left}}
.pbh-player figcaption span{{grid-area:1/1}}
.pbh-player .pbh-longest{{visibility:hidden}}
.pbh-player .pbh-controls{{display:flex;gap:8px;align-items:center;margin:10px 0 0}}
.pbh-player .pbh-controls[hidden]{{display:none}}
.pbh-player button{{min-width:40px;height:36px;padding:0 10px;border-radius:6px;font:600 14px {FONT};cursor:pointer;
  color:{color("text")};background:none;border:1px solid {color("rule")}}}
.pbh-player button:disabled{{opacity:.4;cursor:default}}
.pbh-player .pbh-play{{min-width:70px}}
.pbh-player input{{flex:1;min-width:60px;height:28px;margin:0;cursor:pointer;accent-color:{color("accent")}}}
.pbh-thing text{{text-anchor:middle;dominant-baseline:central;font-size:{SMALLEST_PX}px;font-weight:600;
  fill:{color("text")}}}
.pbh-thing rect{{fill:none}}
{_INKS}
.pbh-thing[data-ink=idle] rect{{fill:{color("idle")}}}
.pbh-thing[data-ink=bad] rect{{fill:none;stroke:{color("bad")};stroke-width:2.5}}
.pbh-thing[data-ink=frame] rect{{stroke:{color("text")};stroke-width:1.4}}
.pbh-thing[data-ink=outline] rect{{stroke:{color("soft")};stroke-width:1.4;stroke-dasharray:5 2.5}}
.pbh-moves .pbh-thing,.pbh-moves .pbh-thing text{{transition:transform .6s ease-in-out,opacity .4s}}
.pbh-moves .pbh-thing rect{{transition:width .6s ease-in-out,height .6s ease-in-out,fill .4s}}
@media (prefers-reduced-motion:reduce){{.pbh-moves .pbh-thing,.pbh-moves .pbh-thing *{{transition:none}}}}
@media print{{.pbh-player .pbh-controls{{display:none}}}}
""".replace("\n  ", "").strip()


class Thing(NamedTuple):
    """A box, at one step.

    Args:
        x, y, width, height: in pixels of the drawing.
        ink: a colour of the palette that carries words, or `idle`, `frame`, `outline` (dashed), `bad` (a red frame), or
            `plain`: words alone.
        words: on it.
        seen: 1, or less for a pale thing; 0 is invisible.
        radius: of its corners; half of its side makes it round. The radius in its first step counts.
    """

    x: float
    y: float
    width: float
    height: float
    ink: str = "forward"
    words: str = ""
    seen: float = 1.0
    radius: float = 3.0


class Step(NamedTuple):
    """The things visible at one step, and the sentence that says which event it shows.

    A thing that a step does not name is invisible. It appears at its next place, and disappears at its last place.
    """

    sentence: str
    things: Mapping[str, Thing]


class Scene(NamedTuple):
    """A drawing of a mechanism in all its steps, for one width of page.

    Args:
        canvas: the part that does not move.
        height: of the drawing.
        steps: their sentences are the same for each width.
    """

    canvas: Canvas
    height: float
    steps: Sequence[Step]


class Player:
    """A mechanism in steps; as a cell's last expression it shows itself.

    Args:
        title: of the figure.
        draw: called with a width (`WIDE`, then `NARROW`), gives the scene for it.
        still: the step that is shown at first, on paper, and without a script. Default: the last step.

    Raises:
        ValueError: scenes without steps, or of different sentences, or a part of the page of more than 60 KB
            compressed.
    """

    def __init__(self, title: str, draw: Callable[[float], Scene], still: int = -1) -> None:
        self.title, self.scenes = title, [draw(WIDE), draw(NARROW)]
        self.sentences = [step.sentence for step in self.scenes[0].steps]
        if not self.sentences or any([s.sentence for s in scene.steps] != self.sentences for scene in self.scenes):
            raise ValueError(f"{title!r}: each width needs the same steps, at least one")
        self.still = range(len(self.sentences))[still]
        size = len(gzip.compress(self._repr_html_().encode(), mtime=0))
        if size > MOST_BYTES:
            raise ValueError(f"{title!r} takes {size:,} bytes compressed, at most {MOST_BYTES:,}; use fewer things")

    def __repr__(self) -> str:
        return f"{self.title}: {self.sentences[self.still]}"

    def _repr_html_(self) -> str:
        places = [_places(scene.steps) for scene in self.scenes]
        data = {"sentences": self.sentences, "still": self.still}
        data["scenes"] = [[list(map(_plain, steps)) for steps in of_scene.values()] for of_scene in places]
        text = as_json(data)
        identity = "pbh-" + hashlib.sha256(f"{self.title}{text}".encode()).hexdigest()[:10]
        sizes = (("pbh-wide", WIDE), ("pbh-narrow", NARROW))
        drawings = "".join(self._drawing(*one, *size) for *one, size in zip(self.scenes, places, sizes, strict=True))
        last = len(self.sentences) - 1
        return (
            f'<figure class="pbh-player" data-pbh="{identity}" aria-labelledby="{identity}-title">'
            f"<style>{STYLE}</style>"
            f'<p class="pbh-title" id="{identity}-title">{escape(self.title)}</p>{drawings}'
            f"{caption(self.sentences[self.still], self.sentences)}"
            '<div class="pbh-controls" hidden><button type="button" aria-label="step back">‹</button>'
            '<button type="button" class="pbh-play">Play</button>'
            '<button type="button" aria-label="next step">›</button>'
            f'<input type="range" min="0" max="{last}" step="1" value="{self.still}" aria-label="step" '
            'autocomplete="off"></div>'
            f"{scripts(identity, text, _SCRIPT, 'showPlayer')}</figure>"
        )

    def _drawing(self, scene: Scene, places: Mapping[str, list[Thing]], name: str, width: float) -> str:
        things = "".join(_drawn(steps[self.still]) for steps in places.values())
        alt = escape(self.sentences[self.still])
        style = f'fill="{color("text")}" font-family="{FONT}" font-size="13" '
        style += 'style="font-variant-numeric:tabular-nums"'
        return (
            f'<svg class="{name}" role="img" aria-label="{alt}" viewBox="0 0 {num(width)} {num(scene.height)}" {style}>'
            f"{scene.canvas.drawing()}{things}</svg>"
        )


def _places(steps: Sequence[Step]) -> dict[str, list[Thing]]:
    """Each thing in every step, the first things at the back; invisible where a step does not name it."""
    names = list(dict.fromkeys(name for step in steps for name in step.things))
    found = {}
    for name in names:
        there = [i for i, step in enumerate(steps) if name in step.things]
        found[name] = []
        for i, step in enumerate(steps):
            after = next((k for k in there if k >= i), there[-1])
            thing = steps[after].things[name]
            found[name].append(thing if name in step.things else thing._replace(seen=0.0))
    return found


def _plain(thing: Thing) -> list:
    """In the form that `player.js` reads."""
    return [*(round(x, 1) for x in thing[:4]), thing.ink, thing.words, thing.seen]


def _drawn(thing: Thing) -> str:
    x, y, width, height = map(num, thing[:4])
    middle = f"translate({num(thing.width / 2)}px, {num(thing.height / 2)}px)"
    return (
        f'<g class="pbh-thing" data-ink="{thing.ink}" style="transform:translate({x}px, {y}px);opacity:{thing.seen:g}">'
        f'<rect style="width:{width}px;height:{height}px" rx="{num(thing.radius)}"/>'
        f'<text style="transform:{middle}">{escape(thing.words)}</text></g>'
    )
