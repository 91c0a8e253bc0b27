"""ZeRO stage by stage: heights are bytes, shards are a whole, sentences carry the numbers of `state_bytes`."""

import re

import pytest

from book.figures.mechanisms.zero_stages import HEIGHT, KINDS, NARROW_HEIGHT, play_zero_stages
from lib.cost import state_bytes
from lib.cost.sizes import RECIPES

MIXED = RECIPES["mixed Adam"]
STAGES = {"plain": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def test_stages_come_in_order_and_each_frees_what_was_marked_before():
    steps = play_zero_stages(4).scenes[0].frames
    assert [step["stage"].words for step in steps] == [
        *("plain", "plain", "ZeRO-1", "ZeRO-1", "ZeRO-2", "ZeRO-2", "ZeRO-3")
    ]
    freed = [{kind for kind in KINDS if step[f"whole 2 {kind}"].ink == "outline"} for step in steps]
    marked = [{kind for kind in KINDS if step[f"whole 2 {kind}"].seen == 0.3} for step in steps]
    assert freed[0] == marked[0] == set() and freed[-1] == set(KINDS)
    for k in (1, 3, 5):
        assert freed[k] == freed[k - 1] and freed[k + 1] == freed[k] | marked[k] and len(marked[k]) == 1


@pytest.mark.parametrize("recipe", ["mixed Adam", "fp32 Adam"])
def test_heights_are_the_bytes_of_the_formula(recipe):
    player, recipe = play_zero_stages(4, RECIPES[recipe]), RECIPES[recipe]
    for scene, height in zip(player.scenes, (HEIGHT, NARROW_HEIGHT), strict=True):
        scale = height / recipe.bytes_per_parameter
        for step in scene.frames[::2]:
            held = state_bytes(1, recipe, zero=STAGES[step["stage"].words], dp=4)
            for kind in KINDS:
                heights = [step[f"kept {rank} {kind}"].height for rank in range(4)]
                assert heights == pytest.approx([scale * held[kind]] * 4)
                assert step[f"sum {kind}"].height == pytest.approx(heights[0])
            assert step["sum"].words == f"{sum(held.values()):g}Ψ bytes"


def test_at_the_end_all_shards_together_are_the_whole():
    for scene in play_zero_stages(4).scenes:
        things = scene.frames[-1]
        for kind in KINDS:
            shards = [things[f"kept {rank} {kind}"] for rank in range(4)]
            whole = things[f"whole 0 {kind}"]
            ends = [shard.y + shard.height for shard in shards]
            assert [shard.y for shard in shards] == pytest.approx([whole.y, *ends[:-1]])
            assert ends[-1] == pytest.approx(whole.y + whole.height)


def test_sentences_say_the_formulas():
    said = [re.findall(r"[\dΨn/ +=.]*Ψ[\dΨn/ +=.]* bytes", sentence) for sentence in play_zero_stages(4).sentences]
    wanted = ["16Ψ bytes", "4Ψ + 12Ψ/n = 7Ψ bytes", "2Ψ + 14Ψ/n = 5.5Ψ bytes", "16Ψ/n = 4Ψ bytes"]
    assert [one.strip() for some in said for one in some] == wanted
    for zero, formula in enumerate(wanted):
        total = float(re.search(r"([\d.]+)Ψ bytes", formula)[1])
        assert total == sum(state_bytes(1, MIXED, zero=zero, dp=4).values())
