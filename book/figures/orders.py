"""Token orders of context parallelism: whose each token is, and how many pairs of causal attention each rank computes.

The problem: all orders give each rank equally many tokens, and not equally much attention.
The idea: an order is a row of tokens in the hues of their ranks, next to bars of the pairs of each rank, on one axis.
The mean is a line, and a bracket says how many means the longest bar is.
"""

from __future__ import annotations

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import NARROW, OUTLINE, RANKS, WIDE, Figure, color, drawn_twice, num
from lib.cost.token_orders import TOKEN_ORDERS, causal_pairs, tokens_of_rank

TOKENS = 48
TOKEN, HIGH = 7.0, 34.0  # pixels: a token, and how high it is
BAR, PITCH = 16.0, 19.0  # of the pairs of a rank, from rank to rank


@drawn_twice
def draw_token_orders(n: int = 4, width: float = WIDE) -> Figure:
    """The tokens in each order, and the pairs of a query and a key of each rank.

    Args:
        n: ranks, 2 to 4: there are hues for four.
    """
    pairs = {order: [causal_pairs(order, TOKENS, n, rank) for rank in range(n)] for order in TOKEN_ORDERS}
    mean, longest = sum(pairs[TOKEN_ORDERS[0]]) / n, max(map(max, pairs.values()))
    spans = ", ".join(f"{_span(some)} in {_name(order)} order" for order, some in pairs.items())
    canvas = Canvas(f"{TOKENS} tokens in the colours of {n} ranks, and the pairs that each rank computes: {spans}.")
    title = f"Who has which of {TOKENS} tokens, and how many pairs each rank computes"
    y = canvas.head(title, [(ink, f"rank {rank}") for rank, ink in enumerate(RANKS[:n])], 0, width)
    is_narrow = width == NARROW
    left = 16.0 if is_narrow else TOKENS * TOKEN + 48
    y += 20 if is_narrow else 0
    canvas.note(0 if is_narrow else left, y - (9 if is_narrow else 14), f"pairs of a rank; dashed: mean {mean:.0f}")
    for order, some in pairs.items():
        _draw_tokens(canvas, y, order, n)
        y += 35 + HIGH if is_narrow else 0
        _draw_pairs(canvas, left, y, some, (width - left - 4) / longest, mean)
        y += n * PITCH + 40
    said = ", ".join(f"{_times(max(some) / mean)} in {_name(order)} order" for order, some in pairs.items())
    return canvas.figure(
        width, y - 14, f"Each rank has {TOKENS // n} tokens. The most that a rank computes is {said}."
    )


def busiest_in_means(order: str, n: int) -> float:
    """The most pairs of a rank, in means, of a sequence that is much longer than the ranks are many."""
    return 2 - 1 / n if order == "contiguous" else 1.0


def _draw_tokens(canvas: Canvas, y: float, order: str, n: int) -> None:
    canvas.text(0, y + 17, _name(order), font_weight=650)
    canvas.note(TOKENS * TOKEN - 1, y + 17, f"many tokens: {busiest_in_means(order, n):.3g} × mean", "end")
    for rank in range(n):
        for token in (token for tokens in tokens_of_rank(order, TOKENS, n, rank) for token in tokens):
            canvas.bars(RANKS[rank]).rect(token * TOKEN, y + 25, TOKEN - 1, HIGH, radius=0)


def _draw_pairs(canvas: Canvas, left: float, y: float, pairs: list[int], scale: float, mean: float) -> None:
    for rank, count in enumerate(pairs):
        top = y + rank * PITCH
        canvas.note(left - 6, top + 12.5, f"{rank}", "end")
        canvas.bars(RANKS[rank]).rect(left, top, count * scale, BAR)
        canvas.words_on(RANKS[rank]).text(left + 20, top + 12.5, f"{count}")
    bottom, end = y + len(pairs) * PITCH, left + max(pairs) * scale
    bracket = f"M{num(left)} {num(bottom + 1)}v5H{num(end)}v-5"
    canvas.layer(FRAMES, **OUTLINE).path(f"M{num(left + mean * scale)} {num(y - 3)}V{num(bottom + 6)}")
    canvas.layer(FRAMES, stroke=color("text"), stroke_width=1.4).path(bracket)
    canvas.text((left + end) / 2, bottom + 21, f"{max(pairs) / mean:.3g} × mean", "middle")


def _name(order: str) -> str:
    return {"zigzag": "zig-zag"}.get(order, order)


def _times(ratio: float) -> str:
    return "the mean" if ratio == 1 else f"{ratio:.3g} times the mean"


def _span(pairs: list[int]) -> str:
    return " to ".join(f"{count}" for count in sorted({min(pairs), max(pairs)}))
