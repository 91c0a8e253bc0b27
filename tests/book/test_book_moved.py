"""An address of a section that moved leads to its page of today; a table that is wrong stops the build."""

import pytest
from sphinx.errors import ExtensionError

from tests.book.book_project import BOOK, build, load

PAGES = {
    "index": "# Book\n\n```{toctree}\nchapters/old\nchapters/new\n```\n",
    "chapters/old": "# Old\n\nText.\n\n## Stays\n\nText.\n",
    "chapters/new": '# New\n\n## Goes on\n\nText.\n\n<figure data-address="a-walk"></figure>\n',
}
TABLE = '["chapters/old"]\n"went" = "chapters/new#goes-on"\n"a-walk" = "chapters/new#a-walk"\n'


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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("change", [("#goes-on", "#gone"), ('"went"', '"stays"')])
def test_a_place_that_is_wrong_stops_the_build(tmp_path, change):
    with pytest.raises(ExtensionError, match="moved.toml: chapters/old#.* is said to be"):
        make(tmp_path, TABLE.replace(*change))


def test_a_page_that_is_left_out_of_the_build_is_no_fault(tmp_path):
    assert make(tmp_path, TABLE.replace("chapters/new#", "chapters/elsewhere#"))
