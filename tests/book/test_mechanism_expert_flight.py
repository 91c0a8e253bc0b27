"""Copies of tokens: each flies to the rank of its expert and home, and the bars are the loads of the router."""

import re
from collections import Counter

import pytest
import torch

from book.figures.mechanisms.expert_flight import TOKENS, TOP_K, N, flight_choices, flight_loads, play_expert_flight
from book.figures.svg import RANKS
from lib import comm, run
from lib.conjugate import rows_to_ranks

FRAMES = {"before": 0, "chosen": 1, "there": 2, "home": -3, "added": -2, "even": -1}
COPIES = N * TOKENS * TOP_K


def copies(things):
    """(home rank, place) → its box."""
    return {tuple(map(int, name.split()[1:])): thing for name, thing in things.items() if name[:5] == "copy "}


def experts():
    """(home rank, place) → the expert of the copy."""
    return {
        (rank, place): expert
        for rank, tokens in enumerate(flight_choices())
        for place, expert in enumerate(expert for chosen in tokens for expert in chosen)
    }


def arrived(world):
    """The home ranks of the copies that come to this rank, as the library's all-to-all sends them."""
    mine = torch.tensor(flight_choices()[world.rank]).flatten()
    load = torch.bincount(mine, minlength=N)
    table = comm.all_gather(load[None], world).tolist()
    return rows_to_ranks(torch.full((len(mine), 1), float(world.rank)), table, world).flatten().tolist()


@pytest.mark.parametrize("scene", play_expert_flight().scenes)
def test_copies_arrive_at_their_experts_in_the_order_of_an_all_to_all_and_fly_home(scene):
    chosen, there, home = (copies(scene.frames[FRAMES[name]]) for name in ("chosen", "there", "home"))
    whose = experts()
    assert len(chosen) == COPIES and chosen == home
    assert {key: thing.ink for key, thing in there.items()} == {key: RANKS[e] for key, e in whose.items()}
    assert all(thing.words == f"{rank}" for (rank, _), thing in there.items()), "the digit is its home"
    lanes = sorted({thing.y for thing in there.values()})
    sent = run(arrived, N)
    for expert, y in enumerate(lanes):
        lane = sorted((thing.x, *key) for key, thing in there.items() if thing.y == y)
        assert {whose[rank, place] for _, rank, place in lane} == {expert}
        assert [rank for _, rank, _ in lane] == sent[expert]


@pytest.mark.parametrize("scene", play_expert_flight().scenes)
def test_who_has_finished_waits_until_the_busiest_has(scene):
    loads = flight_loads()
    assert sum(loads) == COPIES
    for done, things in zip(sorted({*loads}), scene.frames[3:-3], strict=True):
        bright = Counter(RANKS.index(thing.ink) for thing in copies(things).values() if thing.seen == 1)
        assert [bright[e] for e in range(N)] == [min(load, done) for load in loads]
        assert [f"waits {e}" in things for e in range(N)] == [load < done for load in loads]
        busiest = loads.index(max(loads))
        for e, load in enumerate(loads):
            box = things[f"copies {e}"]
            assert things[f"later {e}"].x > box.x + box.width - 1e-9
            assert load < done or things[f"later {e}"].x == pytest.approx(box.x + box.width)
        assert things[f"later {busiest}"].width <= 1 or done < max(loads)


def test_the_sentences_say_the_numbers_of_the_router():
    loads, chosen = flight_loads(), flight_choices()
    most, mean = max(loads), COPIES / N
    leave = sum(e != rank for rank, tokens in enumerate(chosen) for both in tokens for e in both)
    numbers = [re.findall(r"\d+(?:\.\d+)?%?", sentence) for sentence in play_expert_flight().sentences]
    assert all(len({*both}) == TOP_K for tokens in chosen for both in tokens)
    assert numbers[2] == [f"{leave}", f"{COPIES}"]
    assert numbers[3] == [
        *(f"{n}" for n in (loads.index(min(loads)), min(loads), loads.index(most), most)),
        f"{most / mean:.2f}",
    ]
    assert numbers[6] == [f"{mean:.0f}", f"{1 - mean / most:.0%}"]
    assert play_expert_flight().sentences[0].endswith("?")


def test_even_bars_end_where_the_mean_is_and_the_frame_where_the_busiest_was():
    for scene in play_expert_flight().scenes:
        last, there = scene.frames[-1], copies(scene.frames[2])
        ends = {e: max(t.x + t.width for t in there.values() if t.ink == RANKS[e]) for e in range(N)}
        left = min(thing.x for thing in there.values())
        frame, step = last["saved"], (max(ends.values()) - left + 2) / max(flight_loads())
        assert frame.x + frame.width == pytest.approx(max(ends.values()))
        assert frame.x == pytest.approx(left + COPIES / N * step)
        bars = [last[f"even {e}"] for e in range(N)]
        assert [bar.x + bar.width for bar in bars] == pytest.approx([frame.x - 2] * N)
        assert all(thing.seen == 0 for thing in copies(last).values())
