"""Axis by axis, on one screen: what is cut, kept and sent, when, who idles, and PyTorch's name for it."""

from __future__ import annotations

from dataclasses import replace

from book.axes import AXES, PYTORCH, Technique
from book.figures.sheet import Band, Line, draw_sheet
from book.figures.svg import Figure
from book.terms import Term

SHARES = 0.235, 0.225, 0.235, 0.305
HEAD = "cut", "a rank keeps", "a rank sends in a step", "when, and PyTorch's name"
CAPTION = (
    "Bytes, by formulas that lib.cost computes as well: 2 per element sent, 16 of states per parameter. The block is "
    "Llama's, with 4h² + 3hf weights; the block of a GPT has 12h². Ψ parameters; E experts, "
    "each as wide as the MLP, k of them for a token; "
    "d, t, c, e, p ranks along an axis; m microbatches of b sequences of s tokens; l layers of width h, f inside the "
    "MLP. Ranks idle by plan in a pipeline alone."
)
NOT_IN_PYTORCH = "not in PyTorch; in torchtitan"
ALT = "A row for each axis. " + " ".join(f"{one.name}. {one.cut}" for one in AXES)


def axes_table() -> Figure:
    """A row for each of `AXES`.

    Raises:
        ValueError: `lib.cost` contradicts a formula.
    """
    head = Band([[Line(words, "label")] for words in HEAD], SHARES)
    return replace(draw_sheet([head, *map(_row, AXES)], alt=ALT, width=720), caption=CAPTION)


def _row(one: Technique) -> Band:
    kept = [line for said in (*one.memory, one.bubble) if said for line in _lines(said)]
    sent = [line for said in one.sends for line in _lines(said)]
    last = [Line(one.when), Line(one.names[PYTORCH] or NOT_IN_PYTORCH, "strong")]
    return Band([[Line(one.name, "strong"), Line(one.cut)], kept, sent, last], SHARES, begins=True)


def _lines(said: Term | str) -> list[Line]:
    if isinstance(said, str):
        return [Line(said)]
    formula, _, _ = said.said().rpartition(" = ")  # without the number: this table is for any model
    return [Line(said.words), Line(formula.replace(" ", "\u00a0").replace("\u00a0·", " ·"), "strong")]
