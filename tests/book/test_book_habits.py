"""The page of loops: each habit that is tested is on it, with the wrappers that refuse it; chapters lead to it."""

import re

from book.trials.habits import ALL, DDP, FSDP_ALONE, REFUSED, SHARDED, WORKS, ZERO
from tests.book.book_project import build, load, soup
from tests.book.test_promises import ROOT, lost, read

habits = load("book_habits")
PAGE = ROOT / "book" / "loops.md"
DIRECTIVES = re.findall(r"^```\{[\w-]+\}\n```$", read(PAGE), re.MULTILINE)


def rows(table):
    return [[cell.get_text() for cell in row.select("td")] for row in table.select("tbody tr")]


def shown(text):
    return text.replace("`", "")


def test_every_habit_is_on_the_page_with_the_code_to_write(tmp_path):
    site = build(tmp_path, {"index": "# Loops\n\n" + "\n\n".join(DIRECTIVES)}, ["book_habits"])
    works, refused = soup(site, "index").select("table.habits")
    assert len(WORKS) > 10 and rows(works) == [
        [shown(one.habit) + " (DDP, ZeRO)" * (one.wrappers != ALL), shown(one.write)] for one in WORKS
    ]
    wanted = {}  # those with the same code share a row
    for one in REFUSED:
        wanted.setdefault((shown(one.habit), shown(one.write)), []).extend(habits.names(one.wrappers))
    found = {(habit, write): by.split() for habit, by, write in rows(refused)}
    assert len(REFUSED) > 15 and found == {key: [*filter(None, by)] for key, by in wanted.items()}
    marked = [text for one in WORKS + REFUSED for text in re.findall("`([^`]+)`", one.habit + one.write)]
    assert {code.get_text() for table in (works, refused) for code in table.select("code")} == set(marked)
    assert not [one for one in WORKS + REFUSED if (one.habit + one.write).count("`") % 2]


def test_a_wrapper_has_the_name_of_its_technique():
    assert habits.names(ALL) == ["DDP", "ZeRO", "FSDP"]
    assert habits.names(SHARDED) == ["", "ZeRO", "FSDP"] and habits.names(FSDP_ALONE) == ["", "", "FSDP"]
    assert habits.names((*DDP, ZERO[0])) == ["DDP", "ZeRO-1", ""]
    assert habits.coded("`a < b` of <c>") == '<code class="literal">a &lt; b</code> of &lt;c&gt;'


def test_the_page_is_found_and_its_links_lead_to_sections():
    assert lost(PAGE, read(PAGE)) == [] and "- file: book/loops\n" in read("_toc.yml")
    leading = [read(f"chapters/{name}.md") for name in ("03_data_parallelism", "04_zero", "05_fsdp")]
    assert all("](../book/loops.md" in text for text in leading) and "](book/loops.md)" in read("README.md")


def test_the_command_of_the_page_is_that_of_a_test():
    variable, path, name = re.search(r"^(\w+)=\d+ \S+ -m pytest (\S+) -k (\w+)$", read(PAGE), re.MULTILINE).groups()
    assert f'"{variable}"' in read(path) and f"def test_{name}" in read(path)
