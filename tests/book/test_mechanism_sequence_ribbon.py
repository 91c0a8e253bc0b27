"""The ribbon of sequence parallelism: its bytes are those of the formulas, its collectives those of real ranks."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from book.figures.mechanisms.sequence_ribbon import APART, BACKWARD, HALVES, SENT, play_sequence_parallel
from lib import run, trace
from lib.cost import activation_bytes, block_wire_bytes, sizes, wire_bytes
from lib.model import Block, GPTConfig
from lib.tensor_parallel.gpt import tensor_parallel

GPT3 = sizes.MODELS["175B"]


@pytest.fixture(scope="module")
def player():
    return play_sequence_parallel(GPT3, 1, 8)


def megabytes(words):
    """All numbers of MB in words."""
    return [int(number) for number in re.findall(r"(\d+) MB", words)]


def rounded(*n_bytes):
    return [round(n / 1e6) for n in n_bytes]


def test_what_is_kept_at_each_place_is_what_the_formula_says(player):
    """Around each norm 5sbh: a mask, the input of the norm, its output; Korthikanti et al. 2022, section 4.1."""
    steps, sbh = player.scenes[0].frames, GPT3.context * GPT3.d_model
    attention, mlp = 8 * sbh / 8, 16 * sbh / 8
    for at, norm in ((0, 5 * sbh), (APART, 5 * sbh / 8), (BACKWARD, 5 * sbh / 8)):
        kept = [megabytes(steps[at][f"bytes {place}"].words) for place in range(4)]
        assert kept == [[n] for n in rounded(norm, attention, norm, mlp)]
    for at, sliced in ((0, False), (HALVES, False), (APART, True), (SENT, True)):
        total = activation_bytes(GPT3, 1, "selective", tp=8, sequence_parallel=sliced)
        assert megabytes(steps[at]["total 0"].words) == rounded(total)
        bars = sum(steps[at][f"kept bar {place}"].width + 1 for place in range(4))
        longest = steps[at]["kept alone"].width
        assert bars / longest == pytest.approx(total / activation_bytes(GPT3, 1, "selective", tp=8))


def test_the_wire_carries_what_two_all_reduces_do_and_backward_two_halves_more(player):
    steps, x_bytes = player.scenes[0].frames, 2 * GPT3.context * GPT3.d_model
    two = rounded(2 * wire_bytes("all_reduce", x_bytes, 8))
    assert [megabytes(steps[at]["total 1"].words) for at in (0, HALVES, APART, SENT)] == [two] * 4
    alone, sliced = (block_wire_bytes(x_bytes, 8, sequence_parallel=how) for how in (False, True))
    whole, cut = (activation_bytes(GPT3, 1, "selective", tp=8, sequence_parallel=how) for how in (False, True))
    assert megabytes(player.sentences[-1]) == rounded(sliced, alone), "what is sent, in both passes"
    assert megabytes(player.sentences[-2]) == rounded(cut, whole), "and what is kept, without what is sent"
    assert megabytes(steps[BACKWARD]["total 1"].words) == rounded(sliced)
    counts = [sum(name.startswith("sent bar") for name in step) for step in steps]
    assert counts == [4, 4, 4, 1, 2, 2, 2, 3, 4, 4, 4, 10]


def test_the_collectives_come_in_the_order_of_real_ranks(player):
    def kinds(world):
        blocks = [Block(GPTConfig(d_model=8, num_heads=2, context=4)) for _ in range(2)]
        layers = nn.Sequential(*(tensor_parallel(block, world, True) for block in blocks))
        with trace.record(world.rank) as seen, torch.no_grad():
            layers(torch.randn(1, 2, 8))
        return [event.kind.replace("_", "-") for event in seen.events]

    drawn = []
    for step in player.scenes[0].frames[APART + 1 : SENT]:
        bright = [thing for name, thing in step.items() if name.startswith("call") and thing.seen == 1]
        drawn += [thing.words for thing in bright]
    assert drawn == run(kinds, 2)[0][1:5], "from the first reduce-scatter to the next"


def test_ranks_share_tokens_then_parts_and_meet_nowhere_else(player):
    for scene in player.scenes:
        first, apart = (scene.frames[at] for at in (0, APART))
        for place in range(4):
            frame = apart[f"kept {place} 0"]
            each = [apart[f"kept {place} {r}"] for r in range(8)]
            side, at = ("height", "y") if place % 2 == 0 else ("width", "x")
            assert sum(getattr(thing, side) + 1 for thing in each) == pytest.approx(
                frame.width if at == "y" else frame.height
            )
            assert [getattr(thing, at) for thing in each] == sorted({getattr(thing, at) for thing in each})
            whole = [first[f"kept {place} {r}"] for r in range(8)]
            full = all(thing.width == thing.height for thing in whole)
            assert full is (place % 2 == 0), "a norm is full on each rank under tensor parallelism"


def test_the_all_gather_leaves_the_all_reduce_and_passes_the_norm(player):
    for scene in player.scenes:
        together, halves, apart = (scene.frames[at] for at in (0, HALVES, APART))
        for pair in range(2):
            norm, after = apart[f"kept {2 * pair} 0"], apart[f"kept {2 * pair + 1} 0"]
            for things in (together, halves):
                assert things[f"bar {pair} 1"].x == things[f"bar {pair} 0"].x + things[f"bar {pair} 0"].width
            assert apart[f"bar {pair} 0"].x < norm.x < norm.x + norm.width < apart[f"bar {pair} 1"].x < after.x
            words = [[things[f"call {pair} {k}"].words for k in range(2)] for things in (together, halves, apart)]
            assert words == [["all-reduce"] * 2] + [["reduce-scatter", "all-gather"]] * 2


def test_forward_goes_from_slices_to_copies_to_parts(player):
    steps = player.scenes[0].frames
    forms = []
    for at in range(APART + 1, SENT):
        one, last = (steps[at][f"now {r}"] for r in (0, 7))
        forms.append("tokens" if one.width > one.height else "parts" if one.width < one.height else last.words)
    assert forms == ["tokens", "8 full copies", "parts", "8 terms", "tokens", "8 full copies", "parts"]
    assert not any(name.startswith("now") for name in steps[SENT])


def test_where_attention_keeps_less_the_norms_weigh_more():
    """The drawing follows the shape: with fewer heads of keys and values the norms are more of what is kept."""
    grouped = play_sequence_parallel(replace(GPT3, num_kv_heads=8), 1, 8).scenes[0].frames[0]
    full = play_sequence_parallel(GPT3, 1, 8).scenes[0].frames[0]
    assert grouped["kept bar 0"].width > full["kept bar 0"].width
