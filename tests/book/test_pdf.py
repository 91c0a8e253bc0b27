"""The book as one PDF: every listed page, a bookmark for each, and links that stay inside."""

import pytest
from pypdf import PdfReader

from tests.book.test_repository import tool
from tools.browser import chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium")

SIDEBAR = '<div class="bd-sidebar-primary"><nav hidden>{links}</nav></div>'
PAGES = {
    "chapters/00_start": ("Start", '<a href="01_memory.html#two">on</a> <a href="https://x.org/">out</a>'),
    "chapters/01_memory": (
        "Memory",
        '<h2 id="two">Two</h2><h2 style="break-before: page">Going deeper</h2>',
    ),
    "book/library/index": ("Library", "left out"),
    "book/claims": ("Claims", "left out"),
}


def test_all_pages_with_bookmarks_and_links(tmp_path, monkeypatch, capsys):
    make_pdf = tool("make_pdf")
    monkeypatch.setattr(make_pdf, "ROOT", tmp_path)
    links = "".join(f'<a href="/{name}.html">{title}</a>' for name, (title, _) in PAGES.items())
    for name, (title, text) in PAGES.items():
        page = tmp_path / "site" / f"{name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"<!doctype html><title>{title}</title>{SIDEBAR.format(links=links)}<h1>{title}</h1>{text}")
    make_pdf.main(tmp_path / "site", tmp_path / "book.pdf")
    pdf = PdfReader(tmp_path / "book.pdf")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["   1  Start", "   1  Memory, and 1 of Going deeper"] and said[2].startswith("3 sheets")
    assert len(pdf.pages) == 3
    titles = [entry.title for entry in pdf.outline if not isinstance(entry, list)]
    assert titles == ["Start", "Memory"]
    assert [entry.title for entry in make_pdf.entries(pdf.outline)][-1] == "Going deeper"
    found = [annotation.get_object() for annotation in pdf.pages[0]["/Annots"]]
    inside = [link for link in found if "/Dest" in link]
    assert [link["/Dest"][0].get_object() for link in inside if "/A" not in link][-1] == pdf.pages[1]
    assert "https://x.org/" in [link["/A"]["/URI"] for link in found if "/A" in link]
    assert not any("127.0.0.1" in str(link) for link in found)
