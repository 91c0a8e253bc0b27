"""The sidebar: parts with short lines, all of it within reach of Tab, a mark on chapters that were read."""

import pytest
import yaml

from tests.book.book_project import BOOK

TOC = yaml.safe_load((BOOK.parent / "_toc.yml").read_text(encoding="utf-8"))
LINKS = {
    "01_memory": "Memory",
    "02_collectives": "Collectives",
    "03_data_parallelism": "A title that is far too long",
    "03c_more": "The second page",
}
PAGE = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>x</title>
<link rel="stylesheet" href="{(BOOK / "static" / "book.css").as_uri()}">
<div class="bd-sidebar-primary" style="width:200px"><nav class="bd-links" aria-label="Main"><ul>{{links}}</ul></nav>
</div>
<main><article><h1>A</h1><section style="height:3000px"><h2>One</h2></section><section id="end"><h2>End</h2></section>
</article></main><script src="{(BOOK / "static" / "sidebar.js").as_uri()}"></script></html>"""
ITEM = """<li class="toctree-l1"><a href="{}.html"{}>{}</a>
<details><summary>below</summary><a href="x.html">x</a></details></li>"""


@pytest.fixture
def chapter(opened, tmp_path):
    """The page of the second chapter."""

    def open_at(name="02_collectives", **options):
        items = (ITEM.format(file, ' class="current"' * (file == name), title) for file, title in LINKS.items())
        path = tmp_path / "chapters" / f"{name}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(PAGE.format(links="".join(items)), encoding="utf-8")
        return opened(path, **options)

    return open_at


def marked(page) -> list[str]:
    return page.locator("a:has(.read)").evaluate_all("all => all.map((a) => a.firstChild.textContent)")


@pytest.mark.parametrize("name", ["02_collectives", "03c_more"])
def test_a_chapter_that_was_read_to_its_end_bears_a_mark(chapter, name):
    page = chapter(name)
    assert marked(page) == []
    page.evaluate("document.getElementById('end').scrollIntoView()")
    page.wait_for_selector(".read", state="attached")
    assert marked(page) == [LINKS[name]] and page.locator("a:has(.read)").text_content() == f"{LINKS[name]} read"
    page.reload()
    page.evaluate("scrollTo(0, 0)")
    assert marked(page) == [LINKS[name]], "it is kept"


def test_somebody_elses_record_marks_nothing(chapter):
    page = chapter(script="localStorage.setItem('parallel-by-hand.read', '{')")
    assert marked(page) == []


def test_tab_and_arrows_reach_every_line(chapter):
    page, reached = chapter(), []
    for _ in range(2 * len(LINKS)):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert reached == [word for title in LINKS.values() for word in (title, "below")]
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.textContent") == list(LINKS.values())[-1]


def test_a_title_takes_one_line(chapter):
    heights = {round(link.bounding_box()["height"]) for link in chapter().locator("li > a").all()}
    assert len(heights) == 1


def test_parts_say_what_is_cut_and_titles_are_short():
    parts = {part["caption"]: part["chapters"] for part in TOC["parts"]}
    assert list(parts)[1:4] == ["Split the data", "Split the layer", "Split the depth"]
    assert {"book/will_it_fit", "book/symptoms", "chapters/workshop"} <= {one["file"] for one in parts["Tools"]}
    titles = [one.get("title", "") for chapters in parts.values() for one in chapters]
    assert max(map(len, titles)) <= 22
    listed = {one["file"] for chapters in parts.values() for one in chapters}
    for page in ("architecture", "claims", "kill_table", "ranks"):
        assert f"book/{page}" not in listed, "a page for those who maintain the book is one level down"
