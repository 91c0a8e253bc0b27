"""The call table on its own: two or three views of one file, no process, no torch."""

import pytest

from lib.runtime.call_table import CallTable, MismatchError
from lib.runtime.hang import FAILED, FINISHED, RUNNING, WAITING, AwaitedCall, all_wait, circle_of


@pytest.fixture
def tables(tmp_path):
    """The table as its starter sees it, then as ranks 0, 1 and 2 do."""
    tables = [CallTable(str(tmp_path / "table"), 3, rank) for rank in (None, 0, 1, 2)]
    yield tables
    for table in tables:
        table.close()


def test_equal_calls_pass_and_are_numbered(tables):
    _, *ranks = tables
    for number in range(200):  # more often round the ring than once
        for table in ranks:
            assert table.call("all", (0, 1, 2), f"call {number}", "here") == number
    assert ranks[0].call("0>1", (0, 1), "message", "here") == 0, "each channel counts alone"


def test_another_call_is_refused_with_both_sides(tables):
    _, a, b, c = tables
    a.call("all", (0, 1, 2), "all_reduce float32[4]", "one.py, line 1")
    with pytest.raises(MismatchError) as caught:
        c.call("all", (0, 1, 2), "all_gather float32[4]", "two.py, line 22")
    assert str(caught.value).splitlines()[:3] == [
        "ranks 0 and 2 disagree: their call number 1 in this group differs.",
        "  rank 0  all_reduce float32[4]  one.py, line 1",
        "  rank 2  all_gather float32[4]  two.py, line 22",
    ]
    assert c.call("all", (0, 1, 2), "all_reduce float32[4]", "two.py, line 23") == 0, "a refused call was not made"
    assert b.call("all", (0, 1, 2), "all_reduce float32[4]", "three.py") == 0
    b.call("0>1", (0, 1), "message float32[4]", "")
    assert a.call("elsewhere", (0, 2), "something else", "") == 0, "another channel is not compared"


@pytest.mark.parametrize(("first", "second"), [("send", "sender"), ("sender", "send"), ("x" * 183, "x" * 184)])
def test_a_beginning_is_not_the_whole(tables, first, second):
    _, a, b, _ = tables
    a.call("all", (0, 1), first, "")
    with pytest.raises(MismatchError):
        b.call("all", (0, 1), second, "")


def test_words_too_long_for_the_table_are_compared_as_far_as_it_reaches(tables):
    _, a, b, _ = tables
    a.call("all", (0, 1), "é" * 100, "é" * 100)
    assert b.call("all", (0, 1), "é" * 100, "") == 0
    a.call("all", (0, 1), "é" * 100, "é" * 100)
    with pytest.raises(MismatchError, match="é{50}"):
        b.call("all", (0, 1), "è" + "é" * 100, "")


def test_who_is_far_ahead_is_compared_as_far_as_the_ring_reaches(tables):
    _, a, b, _ = tables
    for i in range(100):
        a.call("all", (0, 1), f"call {i}", "")
    assert b.call("all", (0, 1), "something else", "") == 0, "overwritten long ago: unchecked"
    for i in range(1, 50):
        b.call("all", (0, 1), f"call {i}", "")
    with pytest.raises(MismatchError, match="call number 51 "):
        b.call("all", (0, 1), "something else", "")


def test_of_more_channels_than_places_the_latest_are_compared(tables):
    parent, a, b, _ = tables
    for i in range(300):
        assert a.call(f"channel {i}", (0, 1), "this", "") == 0
    for i in (140, 299):
        with pytest.raises(MismatchError):
            b.call(f"channel {i}", (0, 1), "that", "")
    assert b.call("channel 139", (0, 1), "that", "") == 0, "its place is given away"
    assert a.call("channel 139", (0, 1), "this", "") == 1, "it counts on in a new place"
    with b.waiting("this", "", (0,), "channel 140", 0), pytest.raises(MismatchError):
        assert parent.view().waits[1].late == (0,), "which was that of channel 140"
        assert b.call("channel 139", (0, 1), "that", "")


def test_states_and_moves(tables):
    parent, a, b, c = tables

    def moves():
        return [moves for _, moves in parent.heads()]

    def waits():
        return all_wait({state for state, _ in parent.heads()})

    assert moves() == [0, 0, 0] and not waits()
    assert parent.view().report().splitlines()[0] == "  rank 0  is starting"
    for table in (a, b, c):
        table.state(RUNNING)
    with a.waiting("send to 1", "here", (1,), "0>1", 0):
        assert parent.row(0)[:3] == (WAITING, 2, ("send to 1", "here", (1,), "0>1", 0))
        assert not waits(), "two still compute"
        b.state(FINISHED)
        with c.waiting("recv from 0", "", (0,), "0>2", 0):
            assert waits()
        c.state(FAILED)
        assert not waits(), "the failure will be told"
    assert moves() == [3, 2, 4] and parent.row(0)[0] == RUNNING


def test_late_are_those_that_did_not_make_this_call(tables):
    parent, a, b, c = tables
    for table in (a, b, c):
        table.call("all", (0, 1, 2), "barrier", "")
    number = a.call("all", (0, 1, 2), "barrier", "")
    with a.waiting("barrier", "here", (0, 1, 2), "all", number):
        assert parent.view().waits[0].late == (1, 2)
        c.call("all", (0, 1, 2), "barrier", "")
        assert parent.view().waits[0].late == (1,)


def test_a_rank_waits_as_long_as_one_of_its_threads_does(tables):
    parent, a, *_ = tables
    with a.waiting("recv from 1", "", (1,), "1>0", 0):
        with a.waiting("send to 2", "", (2,), "0>2", 0):
            assert parent.view().waits[0].what == "send to 2"
        assert parent.view().waits[0].what == "recv from 1"
    assert parent.row(0)[0] == RUNNING


def test_a_report_of_long_lines_and_unreadable_words(tables):
    parent, a, b, c = tables
    with a.waiting("x" * 2000, "", (1,), "0>1", 0), b.waiting("recv from 2", "", (2,), "2>1", 0):
        with c.waiting("recv from 0", "", (0,), "0>2", 0):
            parent._rows[2].call[0] = 7  # as if it was read during a write
            shown = [line.split("  for ")[0].rstrip() for line in parent.view().report().splitlines()[:3]]
    assert shown == ["  rank 0  waits", "  rank 1  waits in recv from 2", "  rank 2  waits"]


@pytest.mark.parametrize(
    ("waits_for", "circle"),
    [
        ({}, []),
        ({0: [1]}, []),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [1], 1: [2], 2: [1]}, [1, 2]),
        ({0: [3], 1: [2], 2: [1]}, [1, 2]),  # 0 waits for a rank that does not
        ({0: [1, 2], 1: [3], 2: [0]}, [0, 2]),  # not the first way out of 0
        ({0: [1], 1: [2], 2: [3], 3: []}, []),
        ({i: list(range(i + 1, 64)) for i in range(64)}, []),  # many ways, none round
    ],
)
def test_the_cycle(waits_for, circle):
    waits = {rank: AwaitedCall(late=tuple(late)) for rank, late in waits_for.items()}
    assert circle_of(waits) == tuple(circle)
