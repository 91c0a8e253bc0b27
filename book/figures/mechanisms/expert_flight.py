"""Expert parallelism: copies of tokens fly to the ranks of their experts, are computed, and fly home.

The problem: an all-to-all of unequal parts is a table of numbers, and a table does not show who waits.
The idea: a box for each copy of a token, in the hue of the expert that it chose. The boxes that arrive on a rank lie in
a row, and the row is a bar: its length is the load. Boxes are computed from left to right, and a rank that has no more
is hatched until the busiest has finished. The choices are those of a router (`lib.moe`), not made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import RANKS, SMALLEST_PX, color, num, text_width
from lib.moe import ExpertOptions, Router

N, TOKENS, TOP_K, WIDTH, SEED = 4, 4, 2, 16, 0  # ranks with an expert each; tokens of a rank; a router
GAP, PALE = 2.0, 0.65  # pixels between boxes; a copy that is not computed yet
Choices = list[list[list[int]]]  # rank → token → its experts, the best first


@cache
def flight_choices() -> Choices:
    """The experts that a new router chooses for random tokens with a common part, as after a norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        router = Router(ExpertOptions(experts=N, top_k=TOP_K), WIDTH)
        nn.init.normal_(router.weight, std=0.5)
        x = torch.randn(N * TOKENS, WIDTH) + 0.5 * torch.randn(WIDTH)
        return router(x.view(N, TOKENS, WIDTH)).chosen.tolist()


def flight_loads() -> list[int]:
    """Copies for each expert."""
    return [sum(expert in chosen for tokens in flight_choices() for chosen in tokens) for expert in range(N)]


def play_expert_flight() -> Player:
    """Each rank has an expert and some tokens; each token goes to two experts and home."""
    title = f"{N * TOKENS} tokens on {N} ranks, an expert on each, {TOP_K} experts for each token"
    return Player(title, lambda width: _Flight(width).scene(), _beats())


def _moments() -> list[int]:
    """Numbers of copies that are computed, in the frames of that beat: whenever a rank has finished."""
    return sorted({*flight_loads()})


def _beats() -> list[Beat]:
    choices, computed, copies = flight_choices(), _moments(), N * TOKENS * TOP_K
    most, mean = computed[-1], copies / N
    hot, cold = (flight_loads().index(load) for load in (most, computed[0]))
    leave = sum(expert != rank for rank, tokens in enumerate(choices) for chosen in tokens for expert in chosen)
    told = [
        ("Before", f"Each token goes to {TOP_K} of {N} experts. How many copies will the busiest rank compute?"),
        ("Chosen", f"The router makes {TOP_K} copies of each token, in the hues of their experts: {copies} in all."),
        ("There", f"An all-to-all sends each copy to the rank of its expert. {leave} of {copies} leave their rank."),
        (
            "Computed",
            f"Rank {cold} has finished after {computed[0]} copies. All wait for rank {hot}, which computes {most}, "
            f"{most / mean:.2f} times the mean.",
        ),
        ("Home", "The second all-to-all sends each copy back to the rank of its token."),
        ("Added", f"The {TOP_K} results of a token are added, weighted by the scores of the router."),
        ("If even", f"With {mean:.0f} copies on each rank the experts would take {1 - mean / most:.0%} less time."),
    ]
    ends = [0, 1, 2, 2 + len(computed), 3 + len(computed), 4 + len(computed), 5 + len(computed)]
    return [Beat(*words, until) for words, until in zip(told, ends, strict=True)]


class _Flight:
    """All frames for one width of page: home at the left and experts at the right, or experts below home."""

    def __init__(self, width: float) -> None:
        self.choices, self.loads = flight_choices(), flight_loads()
        self.width, self.is_narrow = width, width == NARROW
        self.most, self.mean = max(self.loads), N * TOKENS * TOP_K / N
        if self.is_narrow:
            self.top, self.pitch, self.high, self.box = 26.0, 86.0, 26.0, 19.0
            self.home, self.there, self.down = 24.0, 24.0, 36.0
        else:
            self.top, self.pitch, self.high, self.box = 30.0, 52.0, 30.0, 22.0
            self.home, self.there, self.down = 60.0, 318.0, 0.0
        self.end = self.there + self.most * (self.box + GAP) - GAP

    def scene(self) -> Scene:
        frames = [dict(self._things("before")), dict(self._things("chosen")), dict(self._things("there"))]
        frames += [dict(self._things("there", done)) for done in _moments()]
        frames += [dict(self._things(name)) for name in ("home", "added", "even")]
        return Scene(self._canvas(), self.top + N * self.pitch + 8, frames)

    def _canvas(self) -> Canvas:
        canvas = Canvas(f"expert flight {self.width}")
        canvas.note(self.home, 14, "tokens at home")
        if self.is_narrow:
            canvas.note(self.width, 14, "below: copies at experts; digit: home", "end")
        else:
            canvas.note(self.there, 14, "copies at the expert of the rank; digit: their home")
        for rank in range(N):
            canvas.text(0, self._y(rank) + self.high / 2 + 4.5, f"{rank}" if self.is_narrow else f"rank {rank}")
            y, wide = self._y(rank) + self.down, self.end - self.there
            canvas.rect(self.there, y, wide, self.high, fill=canvas.hatched)
            line = f"M{num(self.there - 5)} {num(y - 3)}v{num(self.high + 6)}"
            canvas.path(line, stroke=color(RANKS[rank]), stroke_width=4)
        return canvas

    def _y(self, rank: int) -> float:
        """The top of the tokens of a rank."""
        return self.top + rank * self.pitch

    def _slot(self, place: int) -> float:
        """Where a copy at home begins; there is more room between tokens."""
        return self.home + place * (self.box + GAP) + place // TOP_K * 6

    def _things(self, now: str, done: int = 0) -> Iterator[tuple[str, Thing]]:
        """In a moment, when so many copies of each rank are computed. Later things are in front."""
        yield from self._covers(done)
        for rank in range(N):
            for token in range(TOKENS):
                x, wide = self._slot(TOP_K * token), TOP_K * self.box + (TOP_K - 1) * GAP
                seen = float(now in ("before", "added", "even"))
                words = "y" if now in ("added", "even") else "x"
                yield f"token {words} {rank} {token}", Thing(x, self._y(rank), wide, self.high, "soft", words, seen)
        if now != "before":
            yield from self._copies(now, done)
        if done or now == "even":
            yield from self._ends(now, done)

    def _covers(self, done: int) -> Iterator[tuple[str, Thing]]:
        """The hatching is seen where a rank has nothing to compute and the busiest has."""
        for rank, load in enumerate(self.loads):
            y, step = self._y(rank) + self.down, self.box + GAP
            begin = self.there + max(done, load) * step - GAP if done else self.there
            yield (
                f"copies {rank}",
                Thing(self.there, y, load * step - GAP if done else 0, self.high, "paper", radius=0),
            )
            yield f"later {rank}", Thing(begin, y, max(0.0, self.end + 1 - begin), self.high, "paper", radius=0)

    def _copies(self, now: str, done: int) -> Iterator[tuple[str, Thing]]:
        """At home or at the expert, pale there until they are computed; under the sum of their token in the end."""
        arrived = [0] * N
        for rank, tokens in enumerate(self.choices):
            for place, expert in enumerate(expert for chosen in tokens for expert in chosen):
                number, x, y = arrived[expert], self._slot(place), self._y(rank)
                arrived[expert] += 1
                seen = 1.0
                if now == "there":
                    x, y = self.there + number * (self.box + GAP), self._y(expert) + self.down
                    seen = 1.0 if number < done else PALE
                elif now in ("added", "even"):
                    seen = 0.0
                name = f"copy {rank} {place}"
                yield name, Thing(x, y, self.box, self.high, RANKS[expert], f"{rank}", seen)

    def _ends(self, now: str, done: int) -> Iterator[tuple[str, Thing]]:
        """The loads of ranks that have finished; in the end the bars of even loads, in the frame of the busiest."""
        step = self.box + GAP
        for rank, load in enumerate(self.loads):
            y = self._y(rank) + self.down
            if now == "even":
                wide = self.mean * step - GAP
                yield f"even {rank}", Thing(self.there, y, wide, self.high, RANKS[rank], f"{self.mean:.0f} copies")
            elif load < done:
                words = "waits"
                room = max((done - load) * step - GAP, text_width(words, SMALLEST_PX) + 4)
                yield f"waits {rank}", Thing(self.there + load * step, y, room, self.high, "plain", words)
        if now == "even":
            top, bottom = self._y(0) + self.down - 4, self._y(N - 1) + self.down + self.high + 4
            begin = self.there + self.mean * step
            words = f"−{1 - self.mean / self.most:.0%}"
            yield "saved", Thing(begin, top, self.end - begin, bottom - top, "outline", words)
