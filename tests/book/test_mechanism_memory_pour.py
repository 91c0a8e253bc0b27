"""A training step poured into a GPU: heights are bytes of the formulas, and what does not fit lies outside."""

import re

import pytest

from book.figures.mechanisms.memory_pour import play_memory_pour
from lib import cost
from lib.cost.sizes import MODELS, RECIPES

GB, ROOM = 1e9, 80e9
SHAPE = MODELS["7B"]
STATES = cost.state_bytes(SHAPE.num_parameters, RECIPES["mixed Adam"])
MASTER = 4 * SHAPE.num_parameters
KEPT = SHAPE.num_layers * cost.activation_bytes(SHAPE, 1, "selective")
LOGITS = 3 * 4 * SHAPE.context * SHAPE.vocab_size
REST, FORWARD, LOSS, BACKWARD, STEP, FREED, AGAIN = 0, 4, 5, 9, 10, 11, 12


@pytest.fixture(scope="module")
def player():
    return play_memory_pour("7B", ROOM)


def held(scene, step):
    """Bytes of each kind as they are drawn, inside the GPU and outside."""
    scale = with_gap(scene.frames[0]["parameters 0 inside"].height) / STATES["parameter"]
    found = {}
    for name, thing in scene.frames[step].items():
        if thing.seen and name.endswith("side"):
            kind, place = name.rsplit(" ", 2)[::2]
            found[kind, place] = found.get((kind, place), 0) + with_gap(thing.height) / scale
    return found


def with_gap(high):
    """The height of a box and of the gap above it: a pixel, and a third of both where they are thin."""
    return high + 1 if high >= 2 else 1.5 * high


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (REST, {"parameters": STATES["parameter"], "master copy": MASTER}),
        (FORWARD, {"activations": KEPT}),
        (LOSS, {"activations": KEPT + LOGITS}),
        (BACKWARD, {"gradients": STATES["gradient"], "activations": 0}),
        (STEP, {"Adam moments": STATES["optimizer"] - MASTER, "gradients": STATES["gradient"]}),
        (FREED, {"Adam moments": STATES["optimizer"] - MASTER, "gradients": 0}),
        (AGAIN, {"activations": KEPT + LOGITS, "Adam moments": STATES["optimizer"] - MASTER}),
    ],
)
def test_heights_are_bytes(player, step, kinds):
    for scene in player.scenes:
        drawn = held(scene, step)
        for kind, n_bytes in kinds.items():
            both = sum(drawn.get((kind, place), 0) for place in ("inside", "outside"))
            assert both == pytest.approx(n_bytes), kind


def test_the_gpu_is_full_before_anything_spills(player):
    for scene in player.scenes:
        for _, said, step in player.beats:
            drawn = held(scene, step)
            inside = sum(n for (_, place), n in drawn.items() if place == "inside")
            outside = sum(n for (_, place), n in drawn.items() if place == "outside")
            assert inside <= ROOM * (1 + 1e-9) and (outside == 0 or inside == pytest.approx(ROOM))
            assert f"{(inside + outside) / GB:.1f}" in said
            assert (f"{outside / GB:.1f} GB do not fit" in said) == (outside > 0) == (step >= STEP)
            frame = scene.frames[step]["frame"]
            assert frame.ink == "bad" and frame.seen == (outside > 0)
            for name, thing in scene.frames[step].items():
                if name.endswith("outside") and thing.seen:
                    assert frame.x <= thing.x and thing.x + thing.width <= frame.x + frame.width
                    assert frame.y <= thing.y and thing.y + thing.height <= frame.y + frame.height, name


def test_forward_goes_down_the_layers_and_backward_up(player):
    for scene in player.scenes:
        busy = [[i for i in range(5) if step[f"group {i}"].ink != "idle"] for step in scene.frames]
        assert busy[1:10] == [[0], [1], [2], [3], [4], [3], [2], [1], [0]]
        for step in range(6, 10):  # the activations of a group go as its gradients come
            things, group = scene.frames[step], busy[step][0]
            assert things[f"gradients {group} inside"].seen and not things[f"activations {group} inside"].seen
            before = scene.frames[step - 1]
            assert before[f"activations {group} inside"].seen and not before[f"gradients {group} inside"].seen
            place = scene.frames[0][f"group {group}"]
            assert before[f"gradients {group} inside"][:4] == place[:4], "it comes from its layers"


def test_what_is_said_is_what_the_formulas_say(player):
    said = player.sentences
    assert [beat.until for beat in player.beats] == [REST, FORWARD, LOSS, BACKWARD, STEP, FREED, AGAIN]
    assert f"{KEPT / SHAPE.num_layers / GB:.2f} GB of activations" in said[1]
    assert f"{KEPT / GB:.1f} GB of activations go, {STATES['gradient'] / GB:.1f} GB of gradients come" in said[3]
    assert f"{16 * SHAPE.num_parameters / GB:.1f} GB" in said[4], "16 bytes per parameter"
    words = player.scenes[0].frames[AGAIN]["activations 0 outside"].words
    assert words == f"activations {(KEPT + LOGITS) / GB:.1f} GB"
    spilled = [t.words for n, t in player.scenes[0].frames[STEP].items() if n.endswith("outside") and t.words]
    assert spilled == ["Adam moments"], "how many bytes they are is said where most of them are"


def test_each_kind_is_named_with_its_bytes(player):
    for scene in player.scenes:  # low on a phone, where a box can be too thin for words
        for *_, step in player.beats:
            words = " ".join(thing.words for thing in scene.frames[step].values() if thing.seen)
            for kind in {kind for kind, _ in held(scene, step)}:
                assert re.search(rf"{kind} \d+\.\d", words), (kind, step, words)


def test_a_gpu_that_is_large_enough_spills_nothing():
    large = play_memory_pour("7B", 192e9)
    assert "do not fit" not in " ".join(large.sentences) and large.sentences[-1].endswith("of 192 GB.")
    assert not any(step["frame"].seen for step in large.scenes[0].frames)
