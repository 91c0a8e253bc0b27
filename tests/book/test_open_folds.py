"""A link into something that is folded opens it."""

import pytest

from tests.book.book_project import BOOK

ROOM = "<p style='height:2000px'>room</p>"
PAGE = f"""<!doctype html><meta charset="utf-8"><title>x</title><p><a href="#run">Run</a> <a href="#deep">Deep</a>
<a href="#none">None</a></p>{ROOM}
<section id="run"><h2>How to run it</h2><details class="deeper"><summary>Open</summary><p id="text">So.</p>
<section id="deep"><h3>Deep</h3><p>Deeper.</p></section>
<details class="folded code"><summary>Code</summary><p id="code">x</p>
<figure data-address="ways-means"><figcaption>Ways</figcaption></figure></details></details></section>{ROOM}
<section id="next"><h2>Next</h2><details class="folded code"><summary>Code</summary><p>y</p></details></section>
<script src="{(BOOK / "static" / "open_folds.js").as_uri()}"></script>"""
OPEN = "[...document.querySelectorAll('details')].map((fold) => fold.open)"
CLOSED, OUTER, BOTH = [False, False, False], [True, False, False], [True, True, False]
LEADS = [("run", OUTER), ("deep", OUTER), ("text", OUTER), ("code", BOTH), ("ways-means=1.0", BOTH), ("next", CLOSED)]


@pytest.mark.parametrize(("place", "are_open"), [*LEADS, ("none", CLOSED), ("%", CLOSED), ("", CLOSED)])
def test_a_fold_opens_when_the_page_is_loaded_and_when_the_address_changes(opened, place, are_open):
    loaded, changed = opened(PAGE, f"#{place}"), opened(PAGE)
    changed.evaluate("to => { location.hash = to }", place)
    changed.wait_for_function("to => location.hash.slice(1) === to", arg=place)
    for page in (loaded, changed):
        assert page.evaluate(OPEN) == are_open
        if are_open != CLOSED:
            sought = f"#{place}" if "=" not in place else "figure"
            assert -1 < page.locator(sought).bounding_box()["y"] < 900, "and is in view"


def test_a_link_to_where_the_reader_is_opens_it_again(opened):
    page = opened(PAGE, "#run")
    page.click("summary >> nth=0")
    assert page.evaluate(OPEN) == CLOSED
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("link", name="Run").click()
    assert page.evaluate(OPEN) == OUTER and page.is_visible("#text")
