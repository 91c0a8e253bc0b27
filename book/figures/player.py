"""Mechanisms that one can play: things that stay the same from frame to frame, told in a few beats.

The problem: a ring that turns or a bucket that fills is a motion, and in a row of stills the reader has to find each
thing again. An animation that starts without the reader, or goes on while it is read, cannot be followed.
The idea: Python computes the place, the colour and the words of each thing in each frame, from a real schedule or a
real collective, and groups the frames into at most seven beats, each an event in one sentence. It opens before the
first, with a question. Play runs one beat and stops; its button says which comes next. A few lines of JavaScript
(`player.js`) put the things there, and they glide. On paper, and without a script, one chosen beat is shown.
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

MOST_BYTES, MOST_BEATS = 60_000, 7

_SCRIPT = Path(__file__).with_name("player.js")
_INKS = "".join(
    f".pbh-thing[data-ink={name}] rect{{fill:{color(name, True)}}}"
    f".pbh-thing[data-ink={name}] text{{fill:{color(f'on-{name}')}}}"
    for name in FILLS
)
STYLE = f"""
.pbh-player{{margin:1.4em 0;padding:14px clamp(8px,2vw,18px) 12px;border-radius:10px;font:15px/1.5 {FONT};
  container-type:inline-size;background:{color("panel")};color:{color("text")};border:1px solid {color("rule")}}}
.pbh-player .pbh-title{{margin:0 0 2px;font-size:13px;color:{color("soft")}}}
.pbh-player svg{{display:block;width:100%;height:auto;margin:auto;touch-action:pan-y;cursor:ew-resize}}
.pbh-player svg.pbh-narrow{{display:none}}
@container (max-width:600px){{.pbh-player svg.pbh-wide{{display:none}}.pbh-player svg.pbh-narrow{{display:block}}
.pbh-player .pbh-beats span{{display:none}}}}
.pbh-player figcaption{{display:grid;margin:0 0 10px;padding:0;font:600 17px/1.4 {FONT};color:{color("text")};
  text-align:left;text-wrap:pretty}}
.pbh-player figcaption span{{grid-area:1/1}}
.pbh-player .pbh-longest{{visibility:hidden}}
.pbh-player .pbh-controls{{display:flex;gap:10px;align-items:center;margin:10px 0 0}}
.pbh-player .pbh-controls[hidden]{{display:none}}
.pbh-player .pbh-play{{min-width:150px;min-height:40px;padding:4px 12px;border-radius:7px;font:650 14px {FONT};
  cursor:pointer;color:{color("panel")};background:{color("accent")};border:0}}
.pbh-player .pbh-beats{{display:flex;flex:1;gap:4px}}
.pbh-player .pbh-beats button{{flex:1;min-height:36px;padding:3px 1px;border:0;border-top:4px solid {color("rule")};
  font:500 12.5px/1.2 {FONT};cursor:pointer;color:{color("soft")};background:none}}
.pbh-player .pbh-beats .pbh-past{{border-color:{color("soft")}}}
.pbh-player .pbh-beats [aria-current]{{border-color:{color("accent")};color:{color("text")};font-weight:650}}
.pbh-player .pbh-count{{font-size:13px;color:{color("soft")};white-space:nowrap;font-variant-numeric:tabular-nums}}
.pbh-thing text{{text-anchor:middle;dominant-baseline:central;font-size:{SMALLEST_PX}px;font-weight:600;
  fill:{color("text")}}}
.pbh-thing rect{{fill:none}}
{_INKS}
.pbh-thing[data-ink=idle] rect{{fill:{color("idle")}}}
.pbh-thing[data-ink=paper] rect{{fill:{color("panel")}}}
.pbh-thing[data-ink=bad] rect{{fill:none;stroke:{color("bad")};stroke-width:2.5}}
.pbh-thing[data-ink=frame] rect{{stroke:{color("text")};stroke-width:1.4}}
.pbh-thing[data-ink=outline] rect{{stroke:{color("soft")};stroke-width:1.4;stroke-dasharray:5 2.5}}
.pbh-moves .pbh-thing,.pbh-moves .pbh-thing text{{transition:transform var(--pbh-glide),opacity var(--pbh-glide)}}
.pbh-moves .pbh-thing rect{{transition:width var(--pbh-glide),height var(--pbh-glide),fill .3s}}
@media (prefers-reduced-motion:reduce){{.pbh-moves .pbh-thing,.pbh-moves .pbh-thing *{{transition:none}}}}
@media print{{.pbh-player .pbh-controls{{display:none}}}}
""".replace("\n  ", "").strip()


class Thing(NamedTuple):
    """A box, in one frame.

    Args:
        x, y, width, height: in pixels of the drawing.
        ink: a colour of the palette that carries words, or `idle`, `frame`, `outline` (dashed), `bad` (a red frame),
            `paper`, which hides what is below, or `plain`: words alone.
        words: on it.
        seen: 1, or less for a pale thing; 0 is invisible.
        radius: of its corners; half of its side makes it round. Its first radius counts.
    """

    x: float
    y: float
    width: float
    height: float
    ink: str = "forward"
    words: str = ""
    seen: float = 1.0
    radius: float = 3.0


Things = Mapping[str, Thing]  # by name: those visible in a frame


class Beat(NamedTuple):
    """Some frames that tell one event.

    Args:
        name: of the event, in a word or two; it is on the button that plays it.
        sentence: what happens in it. That of the first beat, of one frame, says what to watch.
        until: the number of its last frame.
    """

    name: str
    sentence: str
    until: int


class Scene(NamedTuple):
    """A drawing of a mechanism in all its frames, for one width of page.

    A thing that a frame does not name is invisible. It appears at its next place, and disappears at its last place.

    Args:
        canvas: the part that does not move.
        height: of the drawing.
        frames: equally many for each width.
        times: for each frame the place on a time axis at which a finger finds it. Default: evenly over the width.
    """

    canvas: Canvas
    height: float
    frames: Sequence[Things]
    times: Sequence[float] | None = None


class Player:
    """A mechanism in beats; as a cell's last expression it shows itself.

    Args:
        title: of the figure.
        draw: called with a width (`WIDE`, then `NARROW`), gives the scene for it.
        beats: at most seven; the first ends with frame 0, the last with the last frame.
        still: the beat that is shown on paper and without a script. Default: the last. A player that asks shows its
            question on paper.

    Raises:
        ValueError: beats that do not cover the frames one after the other, or scenes of different lengths, or a part
            of the page of more than 60 KB compressed.
    """

    def __init__(self, title: str, draw: Callable[[float], Scene], beats: Sequence[Beat], still: int = -1) -> None:
        self.title, self.beats, self.scenes = title, list(beats), [draw(WIDE), draw(NARROW)]
        ends, last = [beat.until for beat in self.beats], len(self.scenes[0].frames) - 1
        if ends != sorted({*ends}) or not 1 <= len(ends) <= MOST_BEATS or (ends[0], ends[-1]) != (0, last):
            raise ValueError(f"{title!r}: its beats end with {ends}; use 1 to {MOST_BEATS}, from 0 up to {last}")
        if any(len(scene.frames) != last + 1 for scene in self.scenes):
            raise ValueError(f"{title!r}: each width needs the same frames")
        self.still, self.sentences = range(len(ends))[still], [beat.sentence for beat in self.beats]
        self.paper = self.still
        size = len(gzip.compress(self._repr_html_().encode(), mtime=0))
        if size > MOST_BYTES:
            raise ValueError(f"{title!r} takes {size:,} bytes compressed, at most {MOST_BYTES:,}; use fewer things")

    def ask(self, question: str, at: str = "") -> None:
        """Let it begin where a beat ends, with a question as its first sentence.

        Args:
            at: the name of the beat. Default: the first.

        Raises:
            ValueError: there is no such beat before the last.
        """
        names = [beat.name for beat in self.beats]
        if at and at not in names[:-1]:
            raise ValueError(f"{self.title!r} cannot ask after {at!r}; there are {', '.join(names[:-1])}")
        number = names.index(at) if at else 0
        start = self.beats[number].until
        later = [beat._replace(until=beat.until - start) for beat in self.beats[number + 1 :]]
        self.beats, self.still = [Beat(names[0], question, 0), *later], max(0, self.still - number)
        self.paper = 0
        self.sentences = [beat.sentence for beat in self.beats]
        self.scenes = [
            scene._replace(frames=scene.frames[start:], times=scene.times and scene.times[start:])
            for scene in self.scenes
        ]

    def __repr__(self) -> str:
        return f"{self.title}: {self.sentences[self.still]}"

    def _repr_html_(self) -> str:
        places = [_places(scene.frames) for scene in self.scenes]
        data = {"beats": self.beats, "paper": self.paper, "times": [scene.times for scene in self.scenes]}
        data["scenes"] = [[list(map(_plain, frames)) for frames in of_scene.values()] for of_scene in places]
        text = as_json(data)
        identity = "pbh-" + hashlib.sha256(f"{self.title}{text}".encode()).hexdigest()[:10]
        sizes = (("pbh-wide", WIDE), ("pbh-narrow", NARROW))
        drawings = "".join(self._drawing(*one, *size) for *one, size in zip(self.scenes, places, sizes, strict=True))
        beats = "".join(  # no tab stops: arrow keys walk through them
            f'<button type="button" tabindex="-1" aria-label="{escape(name)}"><span>{escape(name)}</span></button>'
            for name, *_ in self.beats
        )
        return (
            f'<figure class="pbh-player" data-pbh="{identity}" aria-labelledby="{identity}-title">'
            f"<style>{STYLE}</style>"
            f'<p class="pbh-title" id="{identity}-title">{escape(self.title)}</p>'
            f"{caption(self.sentences[self.still], self.sentences)}{drawings}"
            '<div class="pbh-controls" hidden><button type="button" class="pbh-play">Start</button>'
            f'<div class="pbh-beats">{beats}</div><span class="pbh-count"></span></div>'
            f"{scripts(identity, text, _SCRIPT, 'showPlayer')}</figure>"
        )

    def _drawing(self, scene: Scene, places: Mapping[str, list[Thing]], name: str, width: float) -> str:
        _, sentence, frame = self.beats[self.still]
        things = "".join(_drawn(frames[frame]) for frames in places.values())
        style = f'fill="{color("text")}" font-family="{FONT}" font-size="13" '
        style += 'style="font-variant-numeric:tabular-nums"'
        return (
            f'<svg class="{name}" role="img" aria-label="{escape(sentence)}" '
            f'viewBox="0 0 {num(width)} {num(scene.height)}" {style}>{scene.canvas.drawing()}{things}</svg>'
        )


def _places(frames: Sequence[Things]) -> dict[str, list[Thing]]:
    """Each thing in every frame, the first things at the back; invisible where a frame does not name it."""
    names = list(dict.fromkeys(name for things in frames for name in things))
    found = {}
    for name in names:
        there = [i for i, things in enumerate(frames) if name in things]
        found[name] = []
        for i, things in enumerate(frames):
            after = next((k for k in there if k >= i), there[-1])
            thing = frames[after][name]
            found[name].append(thing if name in things else thing._replace(seen=0.0))
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
