"""The picture of buckets: filled as the library fills them, sent when its formula says so."""

import re
from functools import cache

import pytest

from book.figures.mechanisms.buckets import play_buckets
from book.figures.player import WIDE
from book.trials import exposed
from lib import cost
from lib.data_parallel.bucketed_gradients import fill_buckets
from lib.model import GPT, GPTConfig

MIB = 2**20


def reduce_s(size):
    return cost.comm_s("all_reduce", size, 2, 1e-3, 100e6)


@cache
def gradients():
    """Names and parameters of the chapter's larger GPT, the last one first."""
    model = GPT(GPTConfig(d_model=256, num_layers=4, num_heads=4, context=64))
    return list(model.named_parameters())[::-1]


def play(bucket_bytes=3 * MIB, backward_s=0.45):
    tensors = [(name, p.nbytes) for name, p in gradients()]
    return play_buckets(tensors, bucket_bytes, backward_s=backward_s, reduce_s=reduce_s)


def test_each_gradient_ends_in_the_bucket_that_the_library_puts_it_in():
    buckets = fill_buckets([p for _, p in gradients()], 3 * MIB)
    of = {id(p): k for k, bucket in enumerate(buckets) for p in bucket}
    for scene in play().scenes:
        last = scene.frames[-1]
        for i, (name, p) in enumerate(gradients()):
            gradient, row = last[f"gradient {i}"], last[f"row {of[id(p)]}"]
            assert gradient.y == row.y and row.x <= gradient.x <= row.x + row.width - gradient.width + 1e-6, name
        rows = [last[f"row {k}"] for k in range(len(buckets))]
        assert [row.ink for row in rows] == ["frame"] * len(buckets)
        assert all(below.y > above.y + above.height for below, above in zip(rows, rows[1:], strict=False)), "up"
        first = gradients()[0][1]
        wide = [last[f"gradient {i}"].width - 2 for i in range(len(gradients()))]
        assert wide == pytest.approx([p.nbytes * wide[0] / first.nbytes for _, p in gradients()]), "width is bytes"


def test_backward_goes_from_the_last_layer_to_the_first():
    frames = play().scenes[0].frames
    order = ["head", *(f"block {k}" for k in (3, 2, 1, 0)), "embed"]
    for things in frames:
        inks = [things[layer].ink for layer in order]
        assert inks == sorted(inks, key=["idle", "backward", "forward"].index) and inks.count("backward") <= 1
    assert [frames[0][layer].ink for layer in order] == ["forward"] * 6
    tops = [frames[0][layer].y for layer in order]
    assert tops == sorted(tops, reverse=True), "up from the loss"
    for before, after in zip(frames, frames[1:], strict=False):
        seen = [
            {name for name, thing in step.items() if "gradient" in name and thing.seen} for step in (before, after)
        ]
        assert seen[0] <= seen[1]


def test_the_numbers_are_those_of_the_formula():
    sizes = [p.nbytes for _, p in gradients()]
    buckets = [sum(p.nbytes for p in bucket) for bucket in fill_buckets([p for _, p in gradients()], 3 * MIB)]
    ready_s = [0.45 * sum(buckets[: k + 1]) / sum(sizes) for k in range(4)]
    times = exposed.overlap(ready_s, [reduce_s(size) for size in buckets])
    sent_ms, exposed_ms = 1e3 * sum(map(reduce_s, buckets)), 1e3 * (times[-1][1] - 0.45)
    player = play()
    assert player.sentences[-1] == (
        f"{1 - exposed_ms / sent_ms:.0%} of the communication was hidden, {exposed_ms:.0f} ms are exposed; "
        f"{len(sizes)} messages after backward would expose {1e3 * sum(map(reduce_s, sizes)):.0f} ms."
    )
    scene = player.scenes[0]
    bars = [scene.frames[-1][f"message {k}"] for k in range(4)]
    a_second = (WIDE - bars[0].x) / (times[-1][1] - times[0][0])
    assert [bar.x - bars[0].x for bar in bars] == pytest.approx([a_second * (a - times[0][0]) for a, _ in times])
    assert [bar.width + 1 for bar in bars] == pytest.approx([a_second * (b - a) for a, b in times])
    full = [sentence for sentence in player.sentences if "is full" in sentence]
    assert [int(re.search(r"(\d+) gradients", x)[1]) for x in full[-4:]] == [16, 14, 16, 6]


def test_a_bucket_waits_for_the_one_ahead():
    slow = play(backward_s=0.1).sentences
    assert sum("waits until bucket" in sentence for sentence in slow) == 2 and "exposed" in slow[-1]
    assert not any("waits until" in sentence for sentence in play().sentences)


def test_a_beat_ends_when_a_bucket_is_full():
    player = play()
    for k in range(4):
        beat = next(beat for beat in player.beats if beat.name == f"Bucket {k}")
        row = player.scenes[0].frames[beat.until]
        assert row[f"said {k}"].words.startswith(re.search(r"\d+ gradients", beat.sentence)[0])
