"""Ring attention: the triangle, the bars, the idle ranks and the words are those of a causal mask, cut over ranks."""

import re
from itertools import pairwise

import pytest
import torch

from book.figures.mechanisms.context_ring import AFTER, BEFORE, TOKEN, TOKENS, play_context_ring
from book.figures.player import NARROW, WIDE
from book.figures.svg import RANKS
from lib import comm, run
from lib.cost.token_orders import causal_pairs, tokens_of_rank

RANK_COUNTS = 2, 3, 4


def moments(n, scene):
    """(order, steps that are done, things) of each frame."""
    told = [(order, done) for order in (BEFORE, AFTER) for done in range(n + 1)]
    return [(*moment, things) for moment, things in zip(told, scene.frames, strict=True)]


def owners(order, n):
    """For each token its rank."""
    found = {token: r for r in range(n) for tokens in tokens_of_rank(order, TOKENS, n, r) for token in tokens}
    return [found[token] for token in range(TOKENS)]


def pairs_by_step(order, n):
    """{(step, rank): pairs of a causal mask}: a rank meets the keys of the rank that is `step` before it."""
    whose, found = owners(order, n), {(step, rank): 0 for step in range(n) for rank in range(n)}
    for query in range(TOKENS):
        for key in range(query + 1):
            found[(whose[query] - whose[key]) % n, whose[query]] += 1
    return found


def filled(things, corner):
    """(query, key) → hue and name of the block that is seen there."""
    x0, y0 = corner
    found = {}
    for name, thing in things.items():
        if re.match(rf"({BEFORE}|{AFTER}) \d", name):
            left, right = (round((x - x0) / TOKEN) for x in (thing.x, thing.x + thing.width))
            top, bottom = (round((y - y0) / TOKEN) for y in (thing.y, thing.y + thing.height))
            seen = {(query, key): (thing.ink, name) for query in range(top, bottom) for key in range(left, right)}
            found |= seen
    return found


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_each_step_fills_its_pairs_of_the_triangle_and_no_later_key(n):
    for scene in play_context_ring(n).scenes:
        first = scene.frames[0]
        corner = min(thing.x for name, thing in first.items() if name[:4] == "key "), first["query 0"].y
        for order, done, things in moments(n, scene):
            whose = owners(order, n)
            step = {(q, k): (whose[q] - whose[k]) % n for q in range(TOKENS) for k in range(q + 1)}
            inks = {pair: ink for pair, (ink, _) in filled(things, corner).items()}
            assert inks == {(q, k): RANKS[whose[q]] for (q, k), at in step.items() if at < done}, (order, done)
            said = {name.split()[1] for _, name in filled(things, corner).values()}
            assert said == {f"{number}" for number in range(1, done + 1)}
            for name, thing in things.items():
                if re.fullmatch(rf"{order} \d+ \d+ \d+", name):
                    assert thing.words == name.split()[1], "a block carries its step"


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_edges_say_whose_each_token_is_at_the_height_and_width_of_its_pairs(n):
    for scene in play_context_ring(n).scenes:
        for order, _, things in moments(n, scene):
            for kind, at, long in (("key", "x", "width"), ("query", "y", "height")):
                chunks = [things[f"{kind} {chunk}"] for chunk in range(2 * n)]
                start = getattr(chunks[0], at)
                whose = [chunks[int(token // (TOKENS / (2 * n)))] for token in range(TOKENS)]
                assert [(c.ink, c.words) for c in whose] == [(RANKS[r], f"{r}") for r in owners(order, n)]
                starts = [start + TOKEN * TOKENS / (2 * n) * chunk for chunk in range(2 * n)]
                assert [getattr(chunk, at) for chunk in chunks] == pytest.approx(starts)
                assert all(getattr(a, at) + getattr(a, long) < getattr(b, at) for a, b in pairwise(chunks))


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_keys_and_values_are_where_a_shift_of_real_ranks_brings_them(n):
    def hold(world):
        kv, held = torch.tensor([world.rank]), []
        for _ in range(world.size):
            held.append(int(kv))
            kv = comm.shift_start(kv, world).wait()
        return held

    held = run(hold, n)
    for scene in play_context_ring(n).scenes:
        for _, done, things in moments(n, scene):
            rows = [things[f"queries {rank}"].y for rank in range(n)]
            there = [thing for name, thing in things.items() if name[:5] == "keys " and thing.seen]
            drawn = [[kv.words for kv in there if kv.y == y] for y in rows]
            assert drawn == [[f"K, V {held[rank][max(done - 1, 0)]}"] for rank in range(n)]
            assert all(RANKS[int(kv.words[-1])] == kv.ink for kv in there)
            assert sum(thing.ink == "comm" for thing in things.values()) == (n if done > 1 else 0)


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_a_rank_is_hatched_where_all_its_keys_are_later(n):
    for scene in play_context_ring(n).scenes:
        for order, done, things in moments(n, scene):
            pairs = pairs_by_step(order, n)
            idle = [done > 0 and not pairs[done - 1, rank] for rank in range(n)]
            assert [things[f"busy {rank}"].seen == 0 for rank in range(n)] == idle
            assert [f"idle {rank}" in things for rank in range(n)] == idle
            if order == AFTER:
                assert not any(idle)
            elif done:
                assert idle == [rank < done - 1 for rank in range(n)], "from its step on, to the end"
        hatched = re.findall(r'fill="url\(#hatched-\w+\)"', scene.canvas.drawing())
        assert len(hatched) == 2 * n, "below each rank and each bar"


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_bars_are_as_long_as_the_pairs_and_end_where_the_busiest_ends(n):
    for scene, width in zip(play_context_ring(n).scenes, (WIDE, NARROW), strict=True):
        steps = moments(n, scene)
        last = {order: things for order, done, things in steps if done == n}
        left, end = steps[0][2]["future"].x, last[BEFORE]["future"].x
        scale = (end - left) / causal_pairs(BEFORE, TOKENS, n, n - 1)
        for order, done, things in steps:
            pairs = pairs_by_step(order, n)
            for rank in range(n):
                bars = [things.get(f"bar {order} {number} {rank}") for number in range(1, done + 1)]
                drawn = [round((bar.width + 1) / scale, 6) if bar else 0 for bar in bars]
                assert drawn == [pairs[step, rank] for step in range(done)], width
                if done:
                    assert things[f"total {rank}"].words == f"{sum(drawn):.0f}"
            most = sum(max(pairs[step, rank] for rank in range(n)) for step in range(done))
            assert things["future"].x == pytest.approx(left + scale * most)
        assert [last[order][f"total {rank}"].words for order in (BEFORE, AFTER) for rank in range(n)] == [
            f"{causal_pairs(order, TOKENS, n, rank)}" for order in (BEFORE, AFTER) for rank in range(n)
        ]
        mean = TOKENS * (TOKENS + 1) / 2 / n
        line = last[BEFORE]["mean 0"]
        assert line.x + line.width / 2 == pytest.approx(left + scale * mean)
        assert last[BEFORE]["mean"].words == f"mean {mean:.0f}"
        frame = last[AFTER]["longest"]
        assert (frame.x, frame.x + frame.width) == pytest.approx((left + scale * mean, end))
        assert frame.words == f"−{1 - scale * mean / (end - left):.0%}"


def test_four_ranks_compute_very_different_numbers_of_pairs_and_then_the_same():
    counts = [[causal_pairs(order, TOKENS, 4, rank) for rank in range(4)] for order in (BEFORE, AFTER)]
    assert counts == [[78, 222, 366, 510], [294] * 4]
    sentences = play_context_ring(4).sentences
    numbers = [re.findall(r"\d+(?:\.\d+)?%?", sentence) for sentence in sentences]
    assert numbers[0] == ["4", "12", "48"]
    assert numbers[1] == ["1", "78"] and numbers[2] == ["2", "0"] and numbers[3] == ["3", "0", "1", "2", "3", "144"]
    assert numbers[4] == ["3", "510", f"{510 / 294:.2f}", "294", "0", "78"]
    assert numbers[5] == ["8", "0"] and numbers[6] == ["294", f"{1 - 294 / 510:.0%}"]


@pytest.mark.parametrize("n", RANK_COUNTS)
def test_it_opens_with_a_short_question_and_nothing_computed(n):
    player = play_context_ring(n)
    assert player.sentences[0].endswith("?") and len(player.sentences[0].split()) <= 20
    for scene in player.scenes:
        assert not any(re.match("bar|total|now|idle|mean", name) for name in scene.frames[0])
    ends = [beat.until for beat in player.beats]
    assert ends == [*range(n + 2), 2 * n + 1], "each step once, then all steps of the zig-zag order"
