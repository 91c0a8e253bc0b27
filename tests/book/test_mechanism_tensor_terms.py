"""Partial sums of a tensor-parallel pair: every number is what torch computes in one process, or half of it."""

import pytest
import torch

from book.figures.mechanisms.tensor_terms import play_tensor_parallel
from lib.cost import wire_bytes

# The input, the weights of both layers, and the gradient of the output.
MATRICES = [[1, 1], [2, 1]], [[0, 2], [1, 1], [-1, 0], [1, 0]], [[0, 1, 1, 2], [-1, 2, 1, 1]], [[1, 2], [1, 3]]
PART, ADDED, DONE, BACK_ADDED, BACK_DONE, FORGOTTEN, BACK_FORGOTTEN = 2, 4, 5, 8, 9, 10, 11


@pytest.fixture
def player():
    return play_tensor_parallel(*MATRICES)


@pytest.fixture
def serial():
    """(h, y, ∂x) of one process."""
    x, up, down, gradient = (torch.tensor(a).double() for a in MATRICES)
    h = torch.relu(x.requires_grad_() @ up.T)
    y = h @ down.T
    y.backward(gradient)
    return h, y, x.grad


def numbers(step, name, rows=range(2), columns=range(2)):
    """The matrix of that name, as one reads it."""
    return torch.tensor(
        [[float(step[f"{name} {i} {j}"].words.replace("−", "-")) for j in columns] for i in rows]
    ).double()


def test_parts_and_terms_are_those_of_the_serial_product(player, serial):
    h, y, dx = serial
    steps = player.scenes[0].frames
    assert torch.equal(numbers(steps[0], "whole h", columns=range(4)), h)
    assert torch.equal(numbers(steps[0], "whole y"), y)
    parts = [numbers(steps[PART], f"h {r}", columns=range(2 * r, 2 * r + 2)) for r in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), h)
    for added, done, slot, right in ((ADDED, DONE, 4, y), (BACK_ADDED, BACK_DONE, 0, dx)):
        terms = [numbers(steps[added], f"term {slot} {r}") for r in range(2)]
        assert torch.equal(terms[0] + terms[1], right)
        assert all(torch.equal(numbers(steps[added], f"sent {slot} {r}"), terms[r]) for r in range(2))
        assert torch.equal(numbers(steps[added], f"sum {slot}"), right)
        assert all(torch.equal(numbers(steps[done], f"sent {slot} {r}"), right) for r in range(2))


def drawn(step, name, ranks) -> list[torch.Tensor]:
    """The matrix of each rank as it stands on the page: rows from top to bottom, columns from left to right."""
    found = []
    for r in ranks:
        things = [thing for key, thing in step.items() if key.startswith(f"{name} {r} ")]
        rows = sorted({thing.y for thing in things})
        read = [sorted((t for t in things if t.y == y), key=lambda t: t.x) for y in rows]
        found.append(torch.tensor([[float(t.words.replace("−", "-")) for t in row] for row in read]))
    return found


def test_a_reader_who_multiplies_the_matrices_as_drawn_gets_the_numbers_and_with_another_order_does_not(player):
    forward, back = (player.scenes[0].frames[at] for at in (DONE - 2, BACK_ADDED - 1))
    for r in range(2):
        (x,), (w1,), (h,), (w2,) = (drawn(forward, name, [r]) for name in ("x", "w1", "h", "w2"))
        (y,), (dx,) = drawn(forward, "term 4", [r]), drawn(back, "term 0", [r])
        (dy,), (dh,), (w1_back,), (w2_back,) = (drawn(back, name, [r]) for name in ("dy", "dh", "w1", "w2"))
        passed = h > 0
        assert torch.equal(torch.relu(x @ w1), h) and torch.equal(h @ w2, y)
        assert torch.equal((dy @ w2_back) * passed, dh) and torch.equal(dh @ w1_back, dx)
        for wrong in (dy @ w2, w2 @ dy, w2_back @ dy):
            assert not torch.equal(wrong * passed, dh)
        assert not any(torch.equal(wrong, dx) for wrong in (dh @ w1, w1 @ dh, w1_back @ dh))
    names = {name: [back[f"name {slot} {r}"].words for r in range(2)] for slot, name in ((1, "W₁"), (3, "W₂"))}
    assert names == {"W₁": ["W₁"] * 2, "W₂": ["W₂"] * 2}
    assert "∂y from the layers above" in player.sentences[5]


def test_in_an_all_reduce_the_terms_lie_on_each_other_and_then_on_each_rank(player):
    for scene in player.scenes:
        for added, slot in ((ADDED, 4), (BACK_ADDED, 0)):
            before, at, after = (
                [scene.frames[step][f"sent {slot} {r} 0 0"] for r in range(2)] for step in range(added - 1, added + 2)
            )
            assert at[0][:4] == at[1][:4] == scene.frames[added][f"sum {slot} 0 0"][:4]
            assert [thing[:4] for thing in before] == [thing[:4] for thing in after], "they return to where they left"
            assert before[0].y < at[0].y < before[1].y and before[0].seen == 0 and after[0].seen == 1


def test_each_rank_holds_half_of_the_weights_and_sends_what_the_formula_says(player):
    names = [name for name in player.scenes[0].frames[1] if name.startswith("w")]
    ranks = [[name for name in names if name.split()[1] == str(r)] for r in range(2)]
    assert list(map(len, ranks)) == [8, 8] and "8 of 16 weights" in player.sentences[1]
    sent = wire_bytes("all_reduce", 4, 2)
    assert f"Each sends {sent:g}." in player.sentences[4] and f"sends {sent:g} more" in player.sentences[5]
    assert [beat.until for beat in player.beats[4:]] == [DONE, BACK_DONE, BACK_FORGOTTEN]
    calls = [i for i, step in enumerate(player.scenes[0].frames) if "call" in step]
    assert calls == [ADDED, BACK_ADDED, FORGOTTEN, BACK_FORGOTTEN], "one all-reduce in each direction"


def test_without_the_all_reduce_both_ranks_are_wrong_and_differ(player, serial):
    _, y, dx = serial
    for at, slot, right in ((FORGOTTEN, 4, y), (BACK_FORGOTTEN, 0, dx)):
        step = player.scenes[0].frames[at]
        terms = [numbers(step, f"term {slot} {r}") for r in range(2)]
        assert not torch.equal(*terms) and not any(torch.equal(term, right) for term in terms)
        assert {name for name, thing in step.items() if thing.ink == "bad"} == {
            "call",
            f"wrong {slot} 0",
            f"wrong {slot} 1",
        }
        assert not any(name.startswith(("sum", "sent")) for name in step)
        assert step["call"].words == ("no g" if slot else "no f")


def test_relu_sees_whole_columns_on_each_rank(player, serial):
    """Of partial sums it would be wrong: cut by columns first."""
    h, *_ = serial
    assert (h == 0).any(), "it has something to do"
    for things in player.scenes[0].frames[PART:DONE]:
        assert things["name 2 0"].words == "ReLU: h"
