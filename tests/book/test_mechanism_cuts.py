"""The cuts of a training step, played: whose is each row and each cell, and what crosses which gap."""

import pytest

from book.figures.mechanisms.cuts import Cut, play_cuts
from book.figures.player import NARROW, WIDE

CUTS = {
    "data": Cut(lambda r: r, lambda layer, c: "", "gradients"),
    "state (ZeRO)": Cut(lambda r: r, lambda layer, c: layer, "gradients, weights"),
    "layer (tensor)": Cut(lambda r: "", lambda layer, c: c, "activations"),
    "depth (pipeline)": Cut(lambda r: "", lambda layer, c: layer, "activations"),
    "all three": Cut(lambda r: r // 2, lambda layer, c: f"{layer // 2}{c // 2}", "gradients"),
}
DATA, ZERO, TENSOR, PIPELINE, ALL = range(1, 11, 2)  # the steps in which they cut; the messages follow


@pytest.fixture(scope="module")
def player():
    return play_cuts(CUTS)


@pytest.fixture(params=[WIDE, NARROW])
def steps(player, request):
    scene = player.scenes[[WIDE, NARROW].index(request.param)]
    return scene.frames


def seen(things, **like):
    """Names of those that are fully there and have these attributes."""
    return {name for name, x in things.items() if x.seen == 1 and all(getattr(x, k) == v for k, v in like.items())}


def test_each_rank_is_where_the_cut_puts_it(steps):
    """Its label lies on its cells: on one that the cut gives to it, and on none of another rank."""
    for (name, cut), at in zip(CUTS.items(), (DATA, ZERO, TENSOR, PIPELINE, ALL), strict=True):
        labels = {thing.words.split()[-1]: thing for key, thing in steps[at].items() if key.startswith("rank ")}
        assert len(labels) == (8 if name == "all three" else 4)
        copies = list(dict.fromkeys(cut.batch(r) for r in range(4)))
        for rank, label in labels.items():
            x, y = label.x + label.width / 2, label.y + label.height / 2
            below = {
                (copies[int(key[0]) % len(copies)], cut.model(int(key[-5]), int(key[-2])))
                for key, cell in steps[at].items()
                if " cell " in key and cell.seen == 1
                if cell.x <= x <= cell.x + cell.width and cell.y <= y <= cell.y + cell.height
            }
            whose = {f"{share}" if name == "state (ZeRO)" else f"{mine}{share}" for mine, share in below}
            assert whose == {rank}, (name, rank)


def test_words_are_in_front_of_what_they_are_written_on(steps):
    names = list(dict.fromkeys(name for step in steps for name in step))
    last = max(names.index(f"{k} cell (3, 3)") for k in range(4))
    written = [name for name in names if "rank" in name]
    assert steps[0]["rank "].words == "model" and all(names.index(name) > last for name in written)


def test_rows_go_to_the_ranks_that_work_on_them(steps):
    def above(at, row):
        """The copies of the model over which a row is."""
        rows = [thing for key, thing in steps[at].items() if key.endswith(f" row {row}")]
        return {
            int(key[0])
            for key, cell in steps[at].items()
            if key.endswith(" cell (0, 0)") and any(thing.x <= cell.x < thing.x + thing.width for thing in rows)
        }

    assert [above(DATA, row) for row in range(4)] == [{0}, {1}, {2}, {3}]
    assert [above(ALL, row) for row in range(4)] == [{0, 2}] * 2 + [{1, 3}] * 2, "two copies, each drawn twice"
    assert [above(TENSOR, row) for row in range(4)] == [{0, 1, 2, 3}] * 4


def test_messages_are_in_the_gaps(steps):
    for at in (DATA, ZERO, TENSOR, PIPELINE, ALL):
        assert not seen(steps[at], ink="comm") and seen(steps[at + 1], ink="comm"), "a cut first, then what it costs"
    arrows = {at: [len(seen(steps[at + 1], ink="comm", words=w)) for w in "⇄⇅"] for at in range(1, 11, 2)}
    assert arrows == {DATA: [0, 4], ZERO: [0, 4], TENSOR: [12, 0], PIPELINE: [0, 12], ALL: [8, 8 + 2]}
    for at in (TENSOR, PIPELINE, ALL):
        things = steps[at + 1]
        cells = [thing for key, thing in things.items() if " cell " in key]
        for name in seen(things, words="⇄") | seen(things, words="⇅"):
            one = things[name]
            assert not any(
                one.x < cell.x + cell.width
                and cell.x < one.x + one.width
                and one.y < cell.y + cell.height
                and cell.y < one.y + one.height
                for cell in cells
            ), (at, name)


def test_zero_keeps_a_quarter_and_borrows_a_layer(steps):
    kept = {name for name in seen(steps[ZERO]) if " cell " in name}
    assert kept == {f"{rank} cell {(rank, column)}" for rank in range(4) for column in range(4)}
    weights = seen(steps[ZERO + 1], words="weights")
    assert len(weights) == 3, "all but the rank that has this layer"
    assert all(steps[ZERO][name].seen == 0 for name in weights)


@pytest.mark.parametrize("owner", [0, 3])
def test_weights_come_from_the_rank_that_keeps_them(owner):
    zero = Cut(lambda r: r, lambda layer, c: abs(owner - layer), "gradients, weights")
    before, after = play_cuts({"zero": zero}).scenes[0].frames[1:3]
    weights = seen(after, words="weights")
    assert {before[name][:2] for name in weights} == {before[f"{owner} cell (0, 0)"][:2]}
    others = {before[f"{k} cell (0, 0)"][:2] for k in range(4) if k != owner}
    assert {after[name][:2] for name in weights} == others


def test_the_sentence_of_a_cut_says_its_parts_and_its_messages(player):
    _, data, zero, tensor, _, both, last = player.sentences
    assert "gradients" in data and "activations" not in data
    assert "weights" in zero and "gradients" in zero and "activations" in tensor
    assert data.startswith("Data parallelism: each rank has 1/4 of the batch and the whole model.")
    assert "each rank has 1/2 of the batch and 1/4 of the model" in both
    assert last == "Each technique is a cut, and the cut decides what must be sent."
    assert [beat.until for beat in player.beats] == [
        0,
        DATA + 1,
        ZERO + 1,
        TENSOR + 1,
        PIPELINE + 1,
        ALL + 1,
        ALL + 2,
    ]


def test_it_ends_with_each_technique_beside_the_others(player, steps):
    last = steps[-1]
    assert [last[f"{k} name"].words for k in range(4)] == list(CUTS)[:4], "3D parallelism is made of these"
    assert [last[f"{k} sent"].words for k in range(4)] == [cut.sent for cut in list(CUTS.values())[:4]]
    assert [last[f"{k} row 3"].words for k in range(4)] == ["rank 3", "rank 3", "row 3", "row 3"]
