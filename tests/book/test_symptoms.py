"""The page Symptoms: each link leads to a heading that exists, and each symptom and each room is on the page."""

import re

from book.figures.museum import rooms
from tests.book.test_promises import ROOT, anchors, lost, read

PAGE = ROOT / "book" / "symptoms.md"
ADDRESSES = dict(re.findall(r"^\[(\w+)\]: (\S+)$", read(PAGE), re.MULTILINE))
# Each link with its address: `lost` does not see the list at the top of the page.
TEXT = re.sub(r"\]\[(\w+)\]", lambda found: f"]({ADDRESSES[found[1]]})", read(PAGE))
LINKS = re.findall(r"\]\(([^)\s]+)\)", TEXT)


def anchor(title: str) -> str:
    (found,) = anchors(f"## {title}")
    return found


def test_every_link_leads_to_a_heading_and_every_address_is_used():
    assert len(LINKS) > 80 and lost(PAGE, TEXT) == []
    assert [name for name, address in ADDRESSES.items() if address not in LINKS] == []


def test_contents_lists_every_section_and_each_has_questions_and_words():
    contents, *sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert re.findall(r"\]\(#([\w-]+)\)", contents) == [anchor(title) for title in titles[:-1]]
    for section in sections[:-1]:
        questions, words = section.split("| | words |")
        assert len(re.findall(r"^\| .*\? \|", questions, re.MULTILINE)) in range(3, 10), section
        assert re.findall(r"^\| (\w[\w-]*) \|", words, re.MULTILINE) == [
            "here",
            "PyTorch",
            "Megatron-LM",
            "DeepSpeed",
        ]


def test_every_room_of_the_museum_is_shown():
    shown = [link.partition("15b_museum.ipynb#")[2] for link in LINKS]
    assert len(rooms()) >= 13
    assert [room.symptom for room in rooms().values() if anchor(room.symptom) not in shown] == []
