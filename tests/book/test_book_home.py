"""The cards of the first page: one for each chapter of the contents, with its number and an icon of its own."""

import re

from docutils import nodes

from tests.book.book_project import BOOK, load

home = load("book_home")
LISTED = re.findall(r"^ {6}- file: (\S+)$", (BOOK.parent / "_toc.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_each_chapter_has_a_card_with_its_number_and_an_icon():
    class App:
        builder = type("", (), {"get_relative_uri": lambda self, at, to: to})()
        config = type("", (), {"root_doc": "start"})()
        env = type(
            "", (), {"toctree_includes": {"start": LISTED}, "titles": dict.fromkeys(LISTED, nodes.Text("T"))}
        )()

    made = home.cards(App, "start").astext()
    numbers = re.findall(r"<b>(\S+) · T</b>", made)
    assert numbers == [*map(str, range(1, 11)), "10c", *map(str, range(11, len(numbers)))] and len(numbers) > 12
    icons = re.findall(r"<svg.*?</svg>", made)
    assert len({*icons}) == len(icons) == len(numbers)
