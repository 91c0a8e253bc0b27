"""Each cause that `lib.doctor numbers` can name has a place in the book where a reader sees it at work."""

import ast
import re
from pathlib import Path

import pytest

from lib.doctor.numbers.page import shown_in

ROOT = Path(__file__).parents[2]
PLACE = re.compile(
    r"chapter (?P<chapter>\d+)(?P<second>c?)(?P<deeper>, deeper)?: (?P<section>.+)|museum, room (?P<room>\S+)"
)
SYMPTOM = re.compile(r"Symptoms, (?P<section>[^:]+)(?:: (?P<question>.+))?")
PLACES = [(cause, place) for cause, places in shown_in(str(ROOT)).items() for place in places]


def causes():
    """The first word of each pair that a rule of the library returns or yields."""
    found = set()
    for name in ("links", "patterns", "recorded_pattern", "comparison"):
        tree = ast.parse((ROOT / "lib" / "doctor" / "numbers" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Return | ast.Yield) and isinstance(node.value, ast.Tuple):
                first = node.value.elts[0]
                found |= {first.value} if isinstance(first, ast.Constant) and isinstance(first.value, str) else set()
    return found


def test_each_cause_has_a_place_and_each_place_a_cause():
    assert causes() == {cause for cause, _ in PLACES}
    assert len(causes()) > 20


@pytest.mark.parametrize(("cause", "place"), PLACES)
def test_a_place_is_there(cause, place):
    if found := SYMPTOM.fullmatch(place):
        text = (ROOT / "book" / "symptoms.md").read_text(encoding="utf-8").replace("$", "").replace("\\", "")
        section = text.split(f"\n## {found['section']}\n")[1].split("\n## ")[0]
        assert not found["question"] or f"| {found['question']} |" in section
        return
    found = PLACE.fullmatch(place)
    assert found, place
    if found["room"]:
        assert f"**Room {found['room']}.**" in (ROOT / "chapters" / "15b_museum.md").read_text(encoding="utf-8")
        return
    letter = "b" if found["deeper"] else found["second"]
    (page,) = (ROOT / "chapters").glob(f"{int(found['chapter']):02}{letter}_*.md")
    titles = re.findall(r"^#{2,3} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found["section"] in titles
