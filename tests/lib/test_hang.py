"""The report of a hang, from what ranks do at one moment: who waits, for whom, and who is late. No process starts."""

from lib.runtime.calls import Call
from lib.runtime.group import Group
from lib.runtime.hang import FINISHED, RUNNING, WAITING, AwaitedCall, Row, View, circle_of, named_ranks


def all_reduce(late, peers=(0, 1, 2, 3)):
    return AwaitedCall("all_reduce, float32[4]", "Cell In[1], line 3", peers, late, 2.0)


def test_the_late_ranks_of_a_collective_are_those_that_did_not_call_it():
    view = View({0: WAITING, 1: RUNNING, 2: WAITING, 3: FINISHED}, {0: all_reduce((1, 3)), 2: all_reduce((1, 3))})
    assert view.summary() == "hang: ranks 0 and 2 wait; rank 3 has finished"
    assert view.report().splitlines() == [
        "  rank 0  waits in all_reduce, float32[4]: ranks 1 and 3 did not call it  for 2.0 s  Cell In[1], line 3",
        "  rank 1  computes",
        "  rank 2  waits in all_reduce, float32[4]: ranks 1 and 3 did not call it  for 2.0 s  Cell In[1], line 3",
        "  rank 3  has finished",
    ]
    assert view.cause() == "Every rank of a group must make the same collective calls, in the same order."


def test_a_cycle_is_found_behind_ranks_that_only_wait_for_it():
    sends = {rank: AwaitedCall(f"send to {peer}", "", (peer,), (peer,)) for rank, peer in ((0, 1), (1, 2), (2, 1))}
    view = View(dict.fromkeys(range(3), WAITING), sends)
    assert circle_of(sends) == (1, 2)
    assert view.summary() == "deadlock: ranks 1 and 2 wait for each other; rank 0 also waits"
    assert view.report().splitlines()[-1] == "  the cycle: 1 waits for 2, 2 waits for 1"
    assert view.cause().startswith("Every rank of the cycle sends first")
    assert circle_of({0: sends[0]}) == ()
    assert named_ranks([3]) == "rank 3" and named_ranks([0, 1, 4]) == "ranks 0, 1 and 4"


def test_a_message_to_or_from_a_rank_that_does_not_exist_is_named():
    channel = ("recv from 2, float32[1]", "line 4", (2,), "group 0", 0)
    rows = {0: Row(FINISHED, 1, None, 0.0, {}), 1: Row(WAITING, 2, channel, 2.0, {})}
    view = View.of(rows)
    assert view.waits[1].late == (2,) and view.circle == ()
    assert view.cause() == "There is no rank 2: the ranks are 0 to 1."


def test_tags_of_messages_that_do_not_meet_are_shown():
    rows = {}
    for rank, kind, tag in ((0, "send", 3), (1, "recv", 4)):
        call = Call.message(kind, "float32[1]", 4, Group("world", (0, 1), rank, Named()), 1 - rank, tag)
        rows[rank] = Row(WAITING, 1, (call.shown, "line 4", call.peers, call.channel, 0), 2.0, {})
    view = View.of(rows)
    assert "rank 0  waits in send to 1, float32[1], tag 3  " in view.report()
    assert "rank 1  waits in recv from 0, float32[1], tag 4  " in view.report()
    assert view.cause().startswith("Each send needs a receive on its peer, and the reverse, with the same tag: find")


class Named:
    """A process group, of which only the name is asked."""

    group_name = "0"
