"""The page Symptoms: each link leads to a heading that exists, and each symptom and each room is on the page."""

import re
from pathlib import Path

from myst_parser.mdit_to_docutils.base import default_slugify as anchor

from book.figures.museum import rooms

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "book"
TEXT = (FOLDER / "symptoms.md").read_text(encoding="utf-8")
ADDRESSES = dict(re.findall(r"^\[(\w+)\]: (\S+)$", TEXT, re.MULTILINE))
LINKS = re.findall(r"\]\(([^)\s]+)\)", TEXT) + [ADDRESSES[name] for name in re.findall(r"\]\[(\w+)\]", TEXT)]


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {anchor(title) for title in re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE)}


def test_links_lead_to_headings():
    assert len(LINKS) > 80
    for link in LINKS:
        page, _, heading = link.partition("#")
        if not page.startswith("https://"):
            path = (FOLDER / page).with_suffix(".md") if page else FOLDER / "symptoms.md"
            assert path.is_file(), link
            assert not heading or heading in anchors(path), link


def test_every_address_is_used():
    assert [name for name, address in ADDRESSES.items() if address not in LINKS] == []


def test_contents_lists_every_section_and_each_has_questions_and_words():
    contents, *sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert re.findall(r"\]\(#([\w-]+)\)", contents) == [anchor(title) for title in titles[:-1]]
    for section in sections[:-1]:
        assert 3 <= section.split("| | words |")[0].count("\n|") - 2 <= 9, section
        assert re.findall(r"^\| (\w[\w-]*) \|", section, re.MULTILINE)[1:] == [
            "here", "PyTorch", "Megatron-LM", "DeepSpeed",
        ]  # fmt: skip


def test_every_room_of_the_museum_is_shown():
    assert len(rooms()) >= 2
    museum = "../chapters/15b_museum.ipynb"
    assert [room.symptom for room in rooms().values() if f"{museum}#{anchor(room.symptom)}" not in LINKS] == []
