"""The picture of a deadlock: the circle that real ranks report, then messages that all arrive."""

import pytest
import torch

from book.figures.mechanisms.deadlock import play_deadlock
from lib import comm
from lib.launch import HangError, run


def messages(n):
    return [f"x of {rank}" for rank in range(n)]


def send_first(world):
    x = torch.zeros(1)
    comm.send(x, world, (world.rank + 1) % world.size).wait()
    comm.recv(x, world, (world.rank - 1) % world.size).wait()


def exchange(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    x = torch.tensor([float(world.rank)])
    return comm.exchange({right: x}, {left: x}, world).wait()[left].item()


def test_the_circle_is_what_real_ranks_report():
    player = play_deadlock(messages(3))
    with pytest.raises(HangError) as caught:
        run(send_first, 3)
    circle = str(caught.value).split("the cycle: ")[1].splitlines()[0]
    assert circle == "0 waits for 1, 1 waits for 2, 2 waits for 0"
    (told,) = [beat for beat in player.beats if circle in beat.sentence]
    assert (told.name, told.until) == ("A circle", 3)


def test_exchange_leaves_what_real_ranks_get():
    last = play_deadlock(messages(3)).scenes[0].frames[-1]
    for rank, got in enumerate(run(exchange, 3)):
        x, line = last[f"x {got:.0f}"], last[f"line {rank} 1"]
        assert (x.x + x.width / 2, x.words) == (pytest.approx(line.x + line.width / 2), f"x of {got:.0f}")
        assert line.y < x.y < line.y + 40, "below its recv"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_waits_appear_one_by_one_and_close_at_the_last(n):
    for scene in play_deadlock(messages(n)).scenes:
        for k, step in enumerate(scene.frames):
            waiting = [rank for rank in range(n) if step[f"wait {rank}"].seen]
            assert waiting == (list(range(k)) if k <= n else [])
            assert bool(step["verdict"].seen) == (k == n), "deadlock is said of the circle alone"
            stuck = [rank for rank in range(n) if step[f"line {rank} 0"].ink == "bad"]
            assert stuck == (list(range(n)) if k == n else [])
        arrived = [step["arrived"].words for step in scene.frames]
        assert arrived == [f"0 of {n} arrived"] * (n + 3) + [f"{n} of {n} arrived"]
        held, moving = scene.frames[n + 1], scene.frames[n + 2]
        assert all(held[f"x {rank}"] != moving[f"x {rank}"] for rank in range(n)), "all move in the same step"
