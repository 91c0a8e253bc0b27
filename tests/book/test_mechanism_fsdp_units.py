"""FSDP's units through a step: what is whole, arrives and leaves is what real ranks do, to the byte."""

import re
import time
from functools import partial

import pytest
import torch

from book.figures.mechanisms.fsdp_units import HIGH, ROOT, live_bytes, moments_of_step, play_fsdp_units
from lib import run, trace
from lib.cost import zero_wire_bytes
from lib.data_parallel.fsdp import FSDP
from lib.model import GPT, GPTConfig, mean_loss

CONFIG = GPTConfig(vocab_size=31, context=6, d_model=16, num_layers=4, num_heads=2)
SIZES = [3e6, 8e6, 8e6, 8e6, 8e6]


def computes(moments):
    """Those in which a block computes, and how many reduce-scatters have begun by then."""
    sent = 0
    for moment in moments:
        sent += len(moment.leaving)
        if moment.unit != ROOT:
            yield moment, sent


@pytest.mark.parametrize("n", [2, 4])
def test_real_ranks_hold_these_units_while_a_block_computes(n):
    def one_step(world):
        torch.manual_seed(0)
        model, log = FSDP(GPT(CONFIG), world, partial(torch.optim.SGD, lr=0.1)), []

        def note(what, number, *_):
            there = [i for i, unit in enumerate(model.units) if unit.flats[0].whole.untyped_storage().nbytes()]
            log.append((what, number, set(there), time.perf_counter()))

        for number, unit in enumerate(model.units[1:], 1):
            unit.module.norm1.register_forward_pre_hook(partial(note, "forward", number))
            unit.module.mlp.register_full_backward_pre_hook(partial(note, "backward", number))
        with trace.record(world.rank) as recorded:
            mean_loss(model(torch.zeros(1, 6, dtype=torch.long)), torch.zeros(1, 6, dtype=torch.long)).backward()
            model.finish()
        reduced = [event.start_s for event in recorded.events if event.kind == "reduce_scatter"]
        seen = [(what, number, there, sum(at < now for at in reduced)) for what, number, there, now in log]
        flats = [unit.flats[0] for unit in model.units]
        live = max(sum(flats[i].whole.nbytes for i in there) for *_, there, _ in log)
        return (
            seen,
            [flat.whole.nbytes for flat in flats],
            live + sum(flat.shard.nbytes for flat in flats),
            recorded.wire_bytes,
        )

    moments = moments_of_step(CONFIG.num_layers)
    for seen, sizes, live, sent in run(one_step, n):
        assert seen == [(m.what, m.unit, m.whole | m.arriving, left) for m, left in computes(moments)]
        assert max(live_bytes(moment, sizes, n) for moment in moments) == live
        last = play_fsdp_units(sizes, n).sentences[-1]
        assert f"sent {sent / 1e6:.2f} MB" in last and f"At most {live / 1e6:.2f} MB" in last


def test_thin_is_a_shard_and_thick_is_whole():
    moments = moments_of_step(4)
    for scene in play_fsdp_units(SIZES, 4).scenes:
        for moment, step in zip(moments, scene.frames, strict=True):
            column = step["shard 0"].x
            for unit in range(5):
                inside = [t for name, t in step.items() if re.match(rf"(shard|others) {unit}\b", name) and t.seen]
                high = sum(thing.height for thing in inside if thing.x == column)
                assert high == pytest.approx(HIGH if unit in moment.whole else HIGH / 4)
                words = {thing.words for thing in step.values() if thing.seen and thing.y == inside[0].y + HIGH / 4}
                assert ("all-gather" in words) == (unit in moment.arriving)
                assert ("reduce-scatter" in words) == (unit in moment.leaving)
            assert ("compute" in step) == bool(moment.what)


def test_the_bar_is_what_is_live():
    moments = moments_of_step(4)
    for scene in play_fsdp_units(SIZES, 4).scenes:
        lengths = [sum(t.width + 1 for name, t in step.items() if name.startswith("live ")) for step in scene.frames]
        live = [live_bytes(moment, SIZES, 4) for moment in moments]
        assert lengths == pytest.approx([size * lengths[0] / live[0] for size in live])
        assert [step["live"].words for step in scene.frames] == [f"{size / 1e6:.2f} MB" for size in live]
        most = [max(live[: number + 1]) for number in range(len(live))]
        for size, step in zip(most, scene.frames, strict=True):
            assert step["highest"].width == pytest.approx(size * lengths[0] / live[0])
            assert step["highest in words"].words == f"highest so far: {size / 1e6:.2f} MB"
        assert not scene.frames[0]["highest"].seen and all(step["highest"].seen for step in scene.frames[1:])
    assert live[0] == live[-1] == sum(SIZES) / 4 and most[-1] == max(live) > 2 * live[-1], "only shards stay"


def test_it_ends_with_a_shard_of_each_gradient_after_two_gathers_and_one_reduction():
    player, moments = play_fsdp_units(SIZES, 4), moments_of_step(4)
    for unit in range(5):
        assert sum(unit in moment.arriving for moment in moments) == 2
        assert sum(unit in moment.leaving for moment in moments) == 1
    for scene in player.scenes:
        first, last = scene.frames[0], scene.frames[-1]
        assert not any(first[f"gradient shard {unit}"].seen for unit in range(5))
        assert all(last[f"gradient shard {unit}"].seen and not last[f"gradient {unit}"].seen for unit in range(5))
    assert f"sent {zero_wire_bytes(3, sum(SIZES), 4) / 1e6:.2f} MB" in player.sentences[-1]
    names = [beat.name for beat in player.beats]
    for name, does in (("First unit", ""), ("Prefetch", "forward"), ("Turn", ""), ("Backward", "backward")):
        assert moments[player.beats[names.index(name)].until].what == does
