"""The page Symptoms: links lead to headings that exist, every room is there, public threads end where they should."""

import contextlib
import io
import re
import tomllib
from collections import Counter

import pytest

from book.figures.museum import rooms
from tests.book.test_promises import ROOT, anchors, lost, read

PAGE = ROOT / "book" / "symptoms.md"
ADDRESSES = dict(re.findall(r"^\[(\w+)\]: (\S+)$", read(PAGE), re.MULTILINE))
# Each link with its address: `lost` does not see the list at the top of the page.
TEXT = re.sub(r"\]\[(\w+)\]", lambda found: f"]({ADDRESSES[found[1]]})", read(PAGE))
LINKS = re.findall(r"\]\(([^)\s]+)\)", TEXT)
THREADS = tomllib.loads(read(ROOT / "tests" / "book" / "symptom_threads.toml"))
NEW = [*THREADS["thread"], *THREADS["later"]]
GITHUB = "https://github.com/"
WITHIN = 3


def anchor(title: str) -> str:
    (found,) = anchors(f"## {title}")
    return found


def questions() -> dict[str, list[tuple[str, str, str]]]:
    """Section -> its questions in order: what is asked, what to suspect, where it is shown."""
    sections = (part.partition("\n") for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:])
    return {
        title: re.findall(r"^\| (.*\?) \| (.*) \| (.*) \|$", text, re.MULTILINE)
        for title, _, text in sections
        if "| question |" in text
    }


def test_every_link_leads_to_a_heading_and_every_address_is_used():
    assert len(LINKS) > 80 and lost(PAGE, TEXT) == []
    assert [name for name, address in ADDRESSES.items() if address not in LINKS] == []


def test_contents_lists_every_section_and_each_has_questions_and_words():
    contents, *sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert re.findall(r"\]\(#([\w-]+)\)", contents) == [anchor(title) for title in titles[:-1]]
    assert [*questions()] == titles[:-1]
    assert {title: len(rows) for title, rows in questions().items() if len(rows) not in range(3, 10)} == {}
    for section in sections[:-1]:
        words = section.partition("| | words |")[2]
        assert re.findall(r"^\| (\w[\w-]*) \|", words, re.MULTILINE) == [
            "here",
            "PyTorch",
            "torchtitan",
            "Megatron-LM",
            "DeepSpeed",
        ]


def test_every_room_of_the_museum_is_shown():
    shown = [link.partition("15b_museum.ipynb#")[2] for link in LINKS]
    assert len(rooms()) >= 13
    assert [room.symptom for room in rooms().values() if anchor(room.symptom) not in shown] == []


def test_the_cell_prints_what_the_page_says():
    ((cell, said),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(cell, {})
    assert out.getvalue() == said


# ---- public threads --------------------------------------------------------------------------------------------------


def test_there_are_ten_threads_and_the_page_cites_none_of_them():
    """They stand for people whose problem the page has not seen."""
    assert len(THREADS["thread"]) == 10
    known = {thread["address"] for thread in NEW}
    assert len(known) == len(NEW) and known.isdisjoint({*LINKS, *(GITHUB + one["at"] for one in THREADS["seen"])})


@pytest.mark.parametrize("thread", NEW, ids=lambda thread: thread["address"].removeprefix(GITHUB))
def test_a_thread_ends_at_a_question_that_has_its_cause(thread):
    now = thread["now"]
    rows = questions()[now["section"]]
    assert now["question"] in range(len(rows) + 1)
    if now["right"]:
        assert now["suspect"] in rows[now["question"] - 1][1]


def test_most_threads_end_within_three_questions():
    def within(when: str, threads: list[dict]) -> int:
        return sum(one[when]["right"] and one[when]["question"] <= WITHIN for one in threads)

    assert [within(when, THREADS["thread"]) for when in ("before", "now")] == [3, 10]
    assert [within(when, THREADS["later"]) for when in ("before", "now")] == [0, 3]


def test_questions_stand_in_the_order_of_their_threads_and_show_at_most_two():
    behind = Counter((one["section"], one["question"]) for one in THREADS["seen"])
    for title, rows in questions().items():
        counts = [behind[title, number] for number in range(1, len(rows) + 1) if behind[title, number]]
        assert counts == sorted(counts, reverse=True), title
        for number, (_, _, shown) in enumerate(rows, 1):
            of = [
                GITHUB + one["at"] for one in THREADS["seen"] if (one["section"], one["question"]) == (title, number)
            ]
            assert re.findall(rf"\(({GITHUB}[\w.-]+/[\w.-]+/(?:issues|pull)/\d+)\)", shown) == of[:2], (title, number)
