"""A guess on a picture: the picture waits for the reader's guess, then it opens and shows who is right.

The problem: an answer that one reads is forgotten, and a question below a picture is read after the picture has given
the answer away.
The idea: the question is the first sentence of the picture, and its answers are buttons on the frame. The page computes
which of them is right, so a number that changes stops the build. A few lines of JavaScript (`guess.js`) keep the
picture closed and the guess in sight; without a script each answer opens by itself, below the picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from html import escape
from pathlib import Path

from book.figures.explorer import Explorer
from book.figures.in_page import as_json, scripts
from book.figures.player import Player
from book.figures.svg import FONT, Figure, color

FEWEST, MOST = 3, 4  # options

_SCRIPT = Path(__file__).with_name("guess.js")
_BUTTON = ".pbh-guess.pbh-live .guess button"
STYLE = f"""
.pbh-guess{{margin:1.4em 0;padding:14px clamp(8px,2vw,18px) 12px;border-radius:10px;font:15px/1.5 {FONT};
  background:{color("panel")};color:{color("text")};border:1px solid {color("rule")}}}
.pbh-guess.pbh-asks{{border-color:{color("accent")};box-shadow:0 0 0 1px {color("accent")}}}
.pbh-guess>figure.pbh-player,.pbh-guess>figure.pbh-explorer{{margin:0;padding:0;border:0;border-radius:0}}
.pbh-guess .pbh-question{{margin:0 0 8px;font:600 17px/1.4 {FONT};text-wrap:pretty}}
.pbh-guess .pbh-answers{{display:grid;align-items:start;margin-top:10px}}
.pbh-guess.pbh-live .pbh-answers>*{{grid-area:1/1;margin:0}}
.pbh-guess .pbh-room,.pbh-guess.pbh-told .guess,.pbh-guess:not(.pbh-told) [role=status]{{visibility:hidden}}
.pbh-guess:not(.pbh-live) .pbh-room,.pbh-guess.pbh-live:has(.pbh-player) .pbh-question{{display:none}}
.pbh-guess .guess{{display:flex;flex-wrap:wrap;gap:8px}}
{_BUTTON}{{min-height:40px;padding:4px 16px;border:1.5px solid {color("accent")};border-radius:8px;cursor:pointer;
  font:650 15px/1.3 {FONT};color:{color("text")};background:{color("panel")}}}
{_BUTTON}:hover,{_BUTTON}[aria-pressed=true]{{color:{color("panel")};background:{color("accent")}}}
{_BUTTON}:last-child{{border-color:transparent;font-weight:500;color:{color("soft")};background:none;
  text-decoration:underline}}
.pbh-guess [role=status]::before{{font-weight:700}}
.pbh-guess[data-verdict=right] [role=status]::before{{content:"✓ "/"";color:{color("ok")}}}
.pbh-guess[data-verdict=wrong] [role=status]::before{{content:"✗ "/"";color:{color("bad")}}}
.pbh-guess.pbh-asks svg{{pointer-events:none}}
.pbh-guess.pbh-asks :is(.pbh-controls,.pbh-knobs){{display:none}}
.pbh-guess.pbh-asks [data-answer]{{visibility:hidden}}
@media print{{.pbh-guess [data-answer]{{visibility:hidden}}
.pbh-guess.pbh-told .guess{{visibility:visible}}.pbh-guess [role=status],{_BUTTON}:last-child{{display:none}}}}
""".replace("\n  ", "").strip()


class Guess:
    """A picture with a question on it; as a cell's last expression it shows itself.

    A `Player` has its first beat and no controls until the reader guesses, then plays on. An `Explorer` has no knobs
    until then, and a `Figure` hides the elements with the attribute `data-answer`.

    Args:
        picture: a fresh one: the question replaces its first sentence.
        question: in a sentence or two.
        options: three or four answers, each with a sentence: why it is right, or which fact it overlooks.
        answer: the right one of them, computed.
        at: the name of a Player's beat, whose end the question is about. Default: the first.
        shown: the name of the beat that shows the answer. Default: the last.

    Raises:
        ValueError: the right answer is none of the options, there are too few or too many, or no beat has this name.
    """

    def __init__(
        self,
        picture: Player | Explorer | Figure,
        question: str,
        options: Mapping[object, str],
        answer: object,
        *,
        at: str = "",
        shown: str = "",
    ) -> None:
        told = {f"{option}": why for option, why in options.items()}
        right, names = f"{answer}", list(told)
        if right not in told:
            raise ValueError(f"{question!r}: the page computes {right}, and the options are {', '.join(names)}")
        if not FEWEST <= len(told) <= MOST:
            raise ValueError(f"{question!r} has {len(told)} options, {', '.join(names)}; give {FEWEST} or {MOST}")
        self.picture, self.question, self.options = picture, question, told
        self.right, self.shown = names.index(right), 1
        if isinstance(picture, Player):
            picture.ask(question, at)
            beats = [beat.name for beat in picture.beats]
            if shown and shown not in beats[1:]:
                raise ValueError(f"{question!r} is answered by no beat {shown!r}; there are {', '.join(beats[1:])}")
            self.shown = beats.index(shown) if shown else len(beats) - 1

    def __repr__(self) -> str:
        return f"{self.question} {', '.join(self.options)}? {self.picture!r}"

    def _repr_html_(self) -> str:
        data = as_json(
            {
                "question": self.question,
                "options": list(self.options.items()),
                "right": self.right,
                "shown": self.shown,
            }
        )
        identity = "pbh-" + hashlib.sha256(f"{self.question}{list(self.options)}".encode()).hexdigest()[:10]
        folds = "".join(
            f'<details class="option {"right" if i == self.right else "wrong"}" name="{identity}">'
            f"<summary>{escape(words)}</summary>{escape(why)}</details>"
            for i, (words, why) in enumerate(self.options.items())
        )
        longest = max(self.options.items(), key=lambda option: len("".join(option)))
        return (
            f'<div class="pbh-guess" data-pbh="{identity}"><style>{STYLE}</style>'
            f'<p class="pbh-question">{escape(self.question)}</p>{self.picture._repr_html_()}'
            f'<div class="pbh-answers"><div class="guess">{folds}</div>'
            f'<p class="pbh-room" aria-hidden="true">✗ You guessed {escape(" It is . ".join(longest))}</p>'
            f'<p role="status" tabindex="-1"></p></div>{scripts(identity, data, _SCRIPT, "askFirst", "div")}</div>'
        )
