"""The museum: its rooms are real and in form, and its judge tells a check that fires from one that disturbs."""

import re

import pytest
import torch

from book.figures.museum import FALSE_ALARM, NOT_HERE, SILENT, UNWRITTEN, Exhibit, elsewhere, rooms
from course.check.catalogue import EXERCISES
from course.check.judge import judge
from course.museum.room import MOST_LINES, SEEDS, RunSeen
from lib.launch import run
from lib.mesh import Mesh, MeshShape
from tests.book.test_repository import tool

ROOMS = rooms()
MONTHS = "January February March April May June July August September October November December".split()
TOLD = re.compile(rf"\[[^\]]+\]\(https://[^)]+\),(?: commit [0-9a-f]+, in| {'| '.join(MONTHS)}) 20\d\d")


@pytest.mark.parametrize("room", ROOMS.values(), ids=[*ROOMS])
def test_a_room_is_in_form(room):
    healthy, *sick = room.programs
    assert len(healthy.text.splitlines()) <= MOST_LINES
    assert len(sick) > 1, "a check that looks at one place could pass: no second sick program"
    assert len({*room.where}) == len(sick) - 1 and room.demand.startswith("It must find ")
    assert all(one.text != healthy.text for one in sick)
    assert TOLD.search(room.source), "the thread with its link, and the month"
    assert len(room.guesses) == 4
    assert len(room.layouts) == 3
    assert all(1 <= MeshShape(**layout).size <= 4 for layout in room.layouts)
    right = next(iter(room.guesses))
    assert right not in f"{room.symptom} {room.story}".lower(), "the story gives the answer away"
    assert room.fields and room.cause.strip() and room.story.strip()


def test_there_are_at_least_twelve_and_no_two_are_alike():
    assert len(ROOMS) >= 12
    assert len({room.symptom for room in ROOMS.values()}) == len(ROOMS)
    ids = [int(one.partition(".")[2]) for one in ROOMS]
    assert ids == sorted(ids) and ids[0] == 4


def gradients_differ(run: RunSeen) -> bool:
    return bool((run["gradient"] - run.alone["gradient"]).norm() > 1e-9)


def test_a_check_must_fire_and_must_not_disturb():
    checks = {
        "": gradients_differ,
        "silent on the sick": lambda run: False,
        "fires on every run": lambda run: True,
        "disturbs healthy ones": lambda run: gradients_differ(run) or run.layout == {"dp": 3},
        "misses a sick one": lambda run: gradients_differ(run) and run.layout != {"dp": 3},
        "disturbs healthy runs, and misses": lambda run: run["loss"] > 2,
        "dp 4, seed": lambda run: "the third layout" if run.layout == {"dp": 4} else "",  # what it says is shown
    }
    verdicts = judge(EXERCISES["15.4"], [*checks.values()], seed=1)
    hints = [case.hint for (case,) in verdicts]
    assert hints[0] == ""
    assert [told for told, hint in zip(checks, hints, strict=True) if told not in hint] == []


@pytest.mark.parametrize("id", ROOMS)
def test_the_healthy_runs_have_three_seeds_in_a_row_and_so_have_those_of_each_sick_program(id):
    """What a program draws by `seed % 3` is there with all three values: no constant divides healthy from sick."""
    runs = dict(EXERCISES[id].inputs(torch.Generator().manual_seed(1), 1)[0]["runs"])
    seeds = {seen.seed for seen in runs.values()}
    assert len(seeds) == max(seeds) - min(seeds) + 1 == SEEDS
    for kind in {name.partition(":")[0] for name in runs}:
        mine = [(tuple(seen.layout.items()), seen.seed) for name, seen in runs.items() if name.startswith(f"{kind}:")]
        assert {seed for _, seed in mine} == seeds and len({layout for layout, _ in mine}) == 3
        assert len({*mine}) == len(mine) == (9 if kind.startswith("silent") else 3)


PLANNED = {one: room for one, room in ROOMS.items() if room.planned}


@pytest.mark.parametrize("room", [*PLANNED.values()], ids=[*PLANNED])
def test_a_healthy_program_with_a_plan_ends_and_the_sick_one_hangs(room):
    for layout in room.layouts:
        run(started, MeshShape(**layout).size, room.programs[0], layout)
    assert "Nothing has moved" in room.victims().hang


def started(world, program, layout):
    return program.load()(Mesh(MeshShape(**layout), world), 0)


def test_what_a_check_says_elsewhere_is_shown_in_each_case():
    def unwritten(run):
        raise NotImplementedError

    def tokens_missing(run):
        return "fewer tokens" if run["tokens"] < 1 else ""

    def always(run):
        return "something is wrong"

    head, *rows = elsewhere(unwritten, tokens_missing, always).shown
    assert head == ["room", *ROOMS]
    said = {name: of_rooms for name, *of_rooms in rows}
    assert [*said] == ["unwritten", "tokens missing", "always"]
    assert {*said["unwritten"]} == {UNWRITTEN}
    assert said["tokens missing"][0] == SILENT
    assert {*said["tokens missing"]} == {SILENT, NOT_HERE}
    assert {*said["always"]} == {FALSE_ALARM}


def test_an_exhibit_is_a_table_or_a_text_and_nothing_in_it_is_markup():
    table = Exhibit([("rank", "a < b"), (0, "1.5"), (1, "")])
    assert f"{table!r}".splitlines() == ["rank  a < b", "0     1.5", "1"]
    assert "a &lt; b" in table._repr_html_()
    assert Exhibit("x <y>")._repr_html_() == '<pre class="exhibit">x &lt;y&gt;</pre>'


def test_the_generator_knows_its_marks(tmp_path):
    museum = tool("museum")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{museum.BEGIN}\nold\n{museum.END}\nafter\n", encoding="utf-8")
    assert museum.with_rooms(page, "new") == f"before\n{museum.BEGIN}\n\nnew\n{museum.END}\nafter\n"
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="must have the lines"):
        museum.with_rooms(page, "new")
    assert museum.anchor("A sum, too many: 2×?") == "a-sum-too-many-2"
