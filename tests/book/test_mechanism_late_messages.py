"""Two ranks whose messages arrive late: each thing is where the simulator has it, and the pauses are framed."""

import pytest

from book.figures.mechanisms.late_messages import play_late_messages
from book.figures.player import WIDE
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs, simulate

M, LATE = 6, 0.5


@pytest.fixture(scope="module")
def seen():
    return simulate(one_f_one_b(2, M), Costs(latency=LATE))


@pytest.fixture(scope="module")
def frames():
    return play_late_messages(M, LATE).scenes[0].frames


def test_actions_and_messages_are_where_the_simulator_has_them(frames, seen):
    unit, left = (WIDE - 52) / seen.makespan, 50
    for slot in seen.compute:
        thing = frames[1][f"{slot.action}"]
        assert (thing.x - left) / unit == pytest.approx(slot.start) and thing.words == f"{slot.action.microbatch}"
    messages = {name: thing for name, thing in frames[1].items() if name.startswith("message")}
    assert len(messages) == 2 * M
    starts = {slot.action: slot.start for slot in seen.compute}
    for slot in seen.compute:
        if f"message {slot.action}" not in messages:
            continue
        message = messages[f"message {slot.action}"]
        arrives = (message.x + message.width + 1 - left) / unit
        assert (message.x - left) / unit == pytest.approx(slot.end) and arrives == pytest.approx(slot.end + LATE)
        down = slot.action.op == Op.F
        needed = slot.action._replace(stage=slot.action.stage + (1 if down else -1))
        assert starts[needed] >= arrives - 1e-9, "the next rank has it before it begins"


def test_without_latency_nothing_is_in_flight(frames):
    assert not [name for name in frames[0] if name.startswith("message")]


def test_messages_run_between_the_rows(frames):
    rows = [thing for name, thing in frames[1].items() if name[0].isdigit()]
    for name, one in frames[1].items():
        if name.startswith("message"):
            assert all(one.y >= row.y + row.height or one.y + one.height <= row.y for row in rows), name


def test_the_pauses_are_framed_and_two_latencies_long(frames, seen):
    found = [thing for name, thing in frames[-1].items() if name.startswith("pause")]
    unit = (WIDE - 52) / seen.makespan
    assert [(thing.width + 1) / unit for thing in found] == [pytest.approx(2 * LATE)] * 2
    assert {thing.ink for thing in found} == {"bad"}
    assert [slot.action.microbatch for _, slot in seen.pauses(1)] == [2, 4]


def test_the_sentences_have_the_numbers_of_the_simulator():
    said = " ".join(play_late_messages(M, LATE).sentences)
    assert "The step ends 3 units later" in said and "pauses before 2 and 4" in said
    assert "The step ends 1 unit later" in " ".join(play_late_messages(4, 0.25).sentences)
