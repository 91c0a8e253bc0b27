"""The step between the halves of an all-reduce: orders, owners and bytes are those of the library."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from book.figures.mechanisms.split_all_reduce import ALL_REDUCE, PLAIN, ZERO_1, play_split_all_reduce
from lib import comm, run, trace
from lib.cost import wire_bytes, zero_wire_bytes
from lib.data_parallel.zero import ZeRO1

OPERATIONS = set(ZERO_1)


def at_home(things, what, place, n=4):
    """(rank, shard) of all that are to be seen where they belong."""
    found = ((r, c, things[f"{what} {r} {c}"]) for r in range(n) for c in range(n))
    return {(r, c) for r, c, thing in found if thing.seen and thing[:2] == things[f"{place} {r} {c}"][:2]}


def test_operations_are_done_from_first_to_last_and_the_step_changes_its_place():
    for scene in play_split_all_reduce(4).scenes:
        orders = [sorted(OPERATIONS, key=lambda one: s[one].x + 9 * s[one].y) for s in scene.frames]
        assert orders == [list(PLAIN)] * 4 + [list(ZERO_1)] * 3
        done = [[one for one in order if s[one].ink != "idle"] for s, order in zip(scene.frames, orders, strict=True)]
        assert done == [list(PLAIN[:k]) for k in range(4)] + [list(ZERO_1[:k]) for k in range(1, 4)]
        assert scene.frames[0]["step"].width == pytest.approx(4 * scene.frames[-1]["step"].width)


def test_the_library_steps_in_this_order_and_gives_each_rank_this_shard():
    def one_step(world):
        sharded = ZeRO1(nn.Linear(4, 4), world, partial(torch.optim.SGD, lr=0.1))
        update = sharded.optimizer.step

        def step():
            with trace.span("optimizer"):
                update()

        sharded.optimizer.step = step
        with trace.record(world.rank) as recorded:
            sharded(torch.ones(2, 4)).sum().backward()
            sharded.finish()
            sharded.step()
        happened = sorted([*recorded.events, *recorded.spans], key=lambda one: one.start_s)
        return [one.kind for one in happened], comm.reduce_scatter(torch.arange(4.0), world).tolist()

    halfway = play_split_all_reduce(4).scenes[0].frames[1]
    for rank, (kinds, shard) in enumerate(run(one_step, 4)):
        assert [kind.replace("optimizer", "step") for kind in kinds] == list(ZERO_1)
        assert [4.0 * c for r, c in at_home(halfway, "gradient", "no gradient") if r == rank] == shard


@pytest.mark.parametrize("n", [2, 3, 4])
def test_both_ways_send_the_bytes_of_the_formula(n):
    player, whole = play_split_all_reduce(n), wire_bytes("all_reduce", 1, n)
    half = wire_bytes("reduce_scatter", 1, n)
    for scene in player.scenes:
        widths = [step["sent"].width for step in scene.frames]
        assert widths == pytest.approx(
            [ALL_REDUCE * sent / whole for sent in (0, half, whole, whole, half, half, whole)]
        )
        assert scene.frames[-1]["all-reduce"].width == ALL_REDUCE
        assert scene.frames[-1]["sent"].words == f"{zero_wire_bytes(1, 1, n):.3g} S"
    said = [re.findall(r"([\d.]+) S\b", sentence) for sentence in player.sentences]
    assert said[1:3] == [[f"{half:.3g}"], [f"{whole:.3g}"]] and said[-1] == said[2]


def test_at_the_end_parameters_are_new_everywhere_and_each_state_is_kept_once():
    everywhere, diagonal = {(r, c) for r in range(4) for c in range(4)}, {(r, r) for r in range(4)}
    for scene in play_split_all_reduce(4).scenes:
        steps = [step for step in scene.frames]
        new = [at_home(things, "new", "old") for things in steps]
        assert new == [set(), set(), set(), everywhere, set(), diagonal, everywhere]
        gradients = [at_home(things, "gradient", "no gradient") for things in steps]
        assert gradients == [everywhere, diagonal, everywhere, everywhere, diagonal, diagonal, diagonal]
        words = [
            {things["gradient {} {}".format(*at)].words for at in here}
            for things, here in zip(steps, gradients, strict=True)
        ]
        assert words == [set("0123")] + [{"Σ"}] * 6
        kept = [{at for at in everywhere if things["states {} {}".format(*at)].ink == "opt"} for things in steps]
        assert kept == [everywhere] * 5 + [diagonal] * 2
