"""What is proved of a schedule, and what is said of one that is wrong."""

import pickle

import pytest

from lib.pipeline.lower import lower
from lib.pipeline.prove import prove, prove_times
from lib.pipeline.schedules.action import Action, Fault, Op, Schedule, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.v_shape import dualpipe_v, v_half, v_min
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.simulate import Costs, Slot, Timeline, simulate

UNEQUAL = Costs(F=1.7, I=0.9, W=1.3, latency=0.4, transfer=0.2)


def all_schedules(n, m):
    yield from (naive(n, m), gpipe(n, m), gpipe(n, m, last_first=True), one_f_one_b(n, m))
    yield from (zb_h1(n, m), zb_h2(n, m), zb_v(n, m), v_min(n, m), v_half(n, m), dualpipe_v(n, m))
    yield from (interleaved(n, m, v) for v in (2, 3) if m % n == 0)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", range(1, 9))
def test_every_schedule_is_proved_with_its_messages(n):
    for m in range(1, 25):
        for schedule in all_schedules(n, m):
            prove(lower(schedule))


def test_an_evaluation_is_what_goes_forward():
    for schedule in all_schedules(4, 8):
        for count in (1, 3, 8):
            forward = prove(lower(lower(schedule).forward_only(count)))
            assert forward.is_forward_only and forward.num_microbatches == count
            assert sum(a.op == Op.F for row in forward.actions for a in row) == forward.num_stages * count
    assert zb_h1(2, 3).forward_only().to_text() == "rank 0: 0F0 0F1 0F2\nrank 1: 1F0 1F1 1F2\n"


@pytest.mark.parametrize("costs", [Costs(), UNEQUAL, Costs(F=[1, 5, 2, 1], I=[3, 1, 1, 2], W=[1, 1, 4, 1])])
def test_messages_in_the_order_of_any_times(costs):
    for schedule in all_schedules(4, 8):
        if schedule.num_stages == 4:
            prove(lower(schedule, costs))


def test_a_receive_in_front_and_a_send_behind_hangs_where_a_send_waits():
    """The order that looks right on each rank. GPipe gets away with it."""

    def by_hand(schedule):
        rows = []
        for row in schedule.actions:
            lines = []
            for action in row:
                stage, op, m = action
                before, behind = (Op.RECV_F, Op.SEND_F) if op == Op.F else (Op.RECV_B, Op.SEND_B)
                first, last = (0, schedule.num_stages - 1) if op == Op.F else (schedule.num_stages - 1, 0)
                lines += [Action(stage, before, m)] * (stage != first) + [action]
                lines += [Action(stage, behind, m)] * (stage != last)
            rows.append(tuple(lines))
        return Schedule(schedule.name, n, m_, schedule.rank_of, tuple(rows))

    hangs = {}
    for n in range(1, 9):
        for m_ in range(1, 25):
            for schedule in (gpipe(n, m_), one_f_one_b(n, m_)):
                simulate(by_hand(schedule))  # as long as nobody waits for a send, all is well
                try:
                    prove(by_hand(schedule))
                except ScheduleError as error:
                    assert "ranks wait for each other" in str(error)
                    hangs[schedule.name] = hangs.get(schedule.name, 0) + 1
    assert hangs == {"1F1B": 161}


WRONG = {  # what somebody has typed, and what is said of it
    "0B0 0F0\n1F0 1B0": "0B0 comes before 0F0\n  rank 0  >0B0< 0F0",
    "0F0 0I0 0W0\n1F0 1W0 1I0": "1W0 comes before 1I0",
    "0F0 0B0\n1F0 1B0 1B0": "1B0 occurs 2 times",
    "0F0 0F1 0B0 0B1\n1F0 1F1 1B1": "1B0 is missing, or 1I0 and 1W0",
    "0F0 0B0 0B1\n1F0 1F1 1B0 1B1": "0F1 is missing",
    "0F0 0I0\n1F0 1B0": "0I0 is half a backward; 0W0 is missing",
    "0F0 0B0 0W0\n1F0 1B0": "0B0 is the full backward, so 0W0 repeats a half of it",
    "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1": (
        "ranks wait for each other\n  rank 0 at 0B0 waits for 1B0, which rank 1 does later\n"
        "  rank 1 at 1F1 waits for 0F1, which rank 0 does later\n  rank 0  0F0   >0B0<"
    ),
    "0F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0": "0SEND_F0 is missing: rank 1 needs the result of 0F0",
    "0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0": "0RECV_B0 is missing on rank 0: 1SEND_B0 has no receive",
    "0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0": "0SEND_F0 comes before 0F0, whose result it sends",
    "0F0 0SEND_F0 0B0 0RECV_B0\n1RECV_F0 1F0 1B0 1SEND_B0": "0RECV_B0 comes after 0B0, which needs its message",
    "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0": "1SEND_F0 is a message that no rank needs",
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F1 1F1 1RECV_F0 1F0 1B0 1SEND_B0 1B1 1SEND_B1": (
        "rank 0 sends 0SEND_F0 next, but rank 1 receives 1RECV_F1"
    ),
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1": (
        "rank 0 at 0SEND_F1 waits for 1RECV_F1, which rank 1 does later\n"
        "  rank 1 at 1SEND_B0 waits for 0RECV_B0, which rank 0 does later"
    ),
    "": "there is no action in it",
    "0F0 0X1": "'0X1' is not an action",
    "0F0 0B0\n0F1 0B1": "0F1 is on rank 1, but rank 0 has stage 0",
    "0F0 0B0\n2F0 2B0": "no rank has stage 1; the stages are 0 to 2",
    "rank 0: 0F0\nrank 2: 1F0": "line 2 says rank 2; it is the line of rank 1",
}
MEANS = [  # the same as data
    (Fault.TOO_EARLY, "0B0 0F0"),
    (Fault.TOO_EARLY, "1W0 1I0"),
    (Fault.REPEATED, "1B0"),
    (Fault.MISSING, "1B0"),
    (Fault.MISSING, "0F1"),
    (Fault.HALF, "0I0 0W0"),
    (Fault.HALF_AGAIN, "0W0 0B0"),
    (Fault.CIRCLE, "0B0 1F1"),
    (Fault.MISSING, "0SEND_F0"),
    (Fault.MISSING, "0RECV_B0"),
    (Fault.TOO_EARLY, "0SEND_F0 0F0"),
    (Fault.TOO_LATE, "0RECV_B0 0B0"),
    (Fault.NEEDLESS, "1SEND_F0"),
    (Fault.CROSSED, "1RECV_F1 0SEND_F0"),
    (Fault.CIRCLE, "0SEND_F1 1SEND_B0"),
    (Fault.EMPTY, ""),
    (Fault.NO_ACTION, ""),
    (Fault.WRONG_RANK, "0F1"),
    (Fault.NO_RANK, ""),
    (Fault.OTHER_LINE, ""),
]


@pytest.mark.parametrize(("text", "means"), list(zip(WRONG, MEANS, strict=True)))
def test_what_is_wrong_is_shown(text, means):
    with pytest.raises(ScheduleError) as caught:
        prove(Schedule.from_text(text))
    error = caught.value
    assert WRONG[text] in str(error), error
    assert (error.kind, " ".join(map(str, error.actions))) == means
    assert error.waits == ({0: 1, 1: 0} if error.kind == Fault.CIRCLE else {})
    again = pickle.loads(pickle.dumps(error))  # it may come out of a rank
    assert (str(again), again.kind, again.actions, again.waits) == (str(error), *vars(error).values())


def test_a_rank_that_waits_for_itself():
    with pytest.raises(ScheduleError, match="rank 0 waits forever") as caught:
        prove(Schedule.from_text("1F0 0F0 1B0 0B0"))
    assert caught.value.kind == Fault.ENDLESS and caught.value.waits == {0: 0}
    assert caught.value.actions == (Action(1, Op.F, 0),)


def test_a_schedule_for_other_stages_or_microbatches():
    right = one_f_one_b(2, 3)
    with pytest.raises(ScheduleError, match="0F2: the microbatches are 0 to 1"):
        prove(Schedule("two", 2, 2, right.rank_of, right.actions))
    with pytest.raises(ScheduleError, match="1F0: the stages are 0 to 0"):
        prove(Schedule("one", 1, 3, (0,), right.actions))
    with pytest.raises(ScheduleError, match="0F0 is on rank 0, but rank 1 has stage 0"):
        prove(Schedule("turned round", 2, 3, (1, 0), right.actions))


def test_text_there_and_back():
    for schedule in all_schedules(3, 6):
        for one in (schedule, lower(schedule)):
            again = Schedule.from_text(one.to_text(), schedule.name)
            assert again == one, schedule.name


def test_what_a_person_may_type():
    typed = """
        # two ranks
        rank 0: 0F0, 0F1  0B0 0B1   # first
        1F0 1B0 1F1 1B1
    """
    assert prove(Schedule.from_text(typed)).actions == one_f_one_b(2, 2).actions


def test_an_evaluation_has_no_backward():
    forward = Schedule.from_text("0F0 0F1\n1F0 1F1")
    assert forward.is_forward_only and simulate(prove(lower(forward))).makespan == 3


def test_simulated_times_can_be():
    for schedule in all_schedules(4, 8):
        prove_times(simulate(schedule, UNEQUAL if schedule.num_stages == 4 else None))


def drawn(text, *times):
    """A drawing: each rank's actions, and when they begin; each takes 1."""
    schedule = Schedule.from_text(text)
    cells = [
        (rank, *cell) for rank, row in enumerate(schedule.actions) for cell in zip(row, times[rank], strict=True)
    ]
    return Timeline.of(schedule, (Slot(rank, action, start, start + 1) for rank, action, start in cells))


@pytest.mark.parametrize(
    ("text", "times", "message"),
    [
        ("0F0 0B0\n1F0 1B0", ([0, 2], [0, 1]), "1F0 begins at 0, but 0F0, which comes before it, ends at 1"),
        ("0F0 0B0\n1F0 1B0", ([0, 2], [1, 2]), "0B0 begins at 2, but 1B0, which comes before it, ends at 3"),
        ("0F0 0I0 0W0\n1F0 1I0 1W0", ([0, 3, 3.5], [1, 2, 3]), "0W0 begins at 3.5, but 0I0"),
        ("0F0 0I0 0W0\n1F0 1I0 1W0", ([0, 2.5, 4], [1, 2, 3]), "0I0 begins at 2.5, but 1I0"),
        ("0F0 0F1\n1F0 1F1", ([0, 0.5], [1, 2]), "0F1 begins at 0.5, but 0F0"),
    ],
)
def test_times_that_cannot_be(text, times, message):
    with pytest.raises(ScheduleError) as error:
        prove_times(drawn(text, *times))
    assert message in str(error.value) and error.value.kind == Fault.TIMES
