"""An address of a section or a page that moved leads to its place of today; a table that is wrong stops the build."""

import pytest
from sphinx.errors import ExtensionError

from tests.book.book_project import BOOK, build, load

PAGES = {
    "index": "# Book\n\n```{toctree}\nchapters/old\nchapters/new\n```\n",
    "chapters/old": "# Old\n\nText.\n\n## Stays\n\nText.\n",
    "chapters/new": '# New\n\n## Goes on\n\nText.\n\n<figure data-address="a-walk"></figure>\n',
}
TABLE = """
["chapters/old"]
"went" = "chapters/new#goes-on"
"a-walk" = "chapters/new#a-walk"

["book/gone"]
"" = "chapters/new"
"""


def make(folder, table=TABLE):
    (folder / "moved.toml").write_text(table, encoding="utf-8")
    extension = load("book_moved")
    before, extension.MOVED = extension.MOVED, folder / "moved.toml"
    try:
        return build(folder, PAGES, ["book_moved"], html_static_path=[str(BOOK / "static")])
    finally:
        extension.MOVED = before


@pytest.mark.parametrize(
    ("kept", "leads"),
    [
        ("old.html#went", "new.html#goes-on"),
        ("old.html#a-walk=1.0", "new.html#a-walk=1.0"),
        ("old.html#stays", "old.html#stays"),
        ("old.html#constructor", "old.html#constructor"),
        ("old.html", "old.html"),
        ("new.html#went", "new.html#went"),
    ],
)
def test_an_address_that_a_reader_kept_leads_to_the_section(opened, site, kept, leads):
    page, _, place = kept.partition("#")
    shown = opened(site / "chapters" / page, f"#{place}" * bool(place))
    shown.wait_for_load_state("load")
    shown.wait_for_url(f"**/{leads}", timeout=2000)
    if kept != leads:
        changed = opened(site / "chapters" / page)
        changed.evaluate("to => { location.hash = to }", place)
        changed.wait_for_url(f"**/{leads}", timeout=2000)


@pytest.mark.parametrize("end", ["", "#goes-on", "#schedule=gpipe&text=0F0+%230B0", "#nowhere"])
def test_an_address_of_a_page_that_is_no_more_leads_to_the_same_place_of_its_page(opened, site, end):
    shown = opened(site / "book" / "gone.html", end)
    shown.wait_for_url(f"**/chapters/new.html{end}", timeout=2000)
    assert shown.locator("h1").inner_text().startswith("New")


def test_without_a_script_it_leads_there_too(opened, site):
    opened(site / "book" / "gone.html", java_script_enabled=False).wait_for_url("**/chapters/new.html", timeout=2000)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("change", [("#goes-on", "#gone"), ('"went"', '"stays"')])
def test_a_place_that_is_wrong_stops_the_build(tmp_path, change):
    with pytest.raises(ExtensionError, match="moved.toml: chapters/old#.* is said to be"):
        make(tmp_path, TABLE.replace(*change))


def test_a_page_that_is_said_to_be_no_more_and_is_there_stops_the_build(tmp_path):
    with pytest.raises(ExtensionError, match="moved.toml: chapters/old# is said to be chapters/new now"):
        make(tmp_path, '["chapters/old"]\n"" = "chapters/new"\n')


def test_the_books_table_leads_to_pages_that_are_there():
    """A build skips pages that it does not have, as a few chapters are built alone."""
    to = {place.partition("#")[0] for moved in load("book_moved").moved_places().values() for place in moved.values()}
    assert to and [page for page in to if not (BOOK.parent / f"{page}.md").is_file()] == []


def test_a_page_that_is_left_out_of_the_build_is_no_fault(tmp_path):
    site = make(tmp_path, TABLE.replace('"chapters/new', '"chapters/elsewhere'))
    assert not (site / "book").exists()
