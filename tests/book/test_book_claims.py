"""The page of claims, on a Sphinx project of a few lines."""

import json

from lib.lab.claims import BUSY
from tests.book.book_project import build, soup

SHOWN = '<table class="claims"><tbody><tr><td>a &lt; b</td><td>1</td></tr></tbody></table>\n'


def test_each_claim_is_listed_under_its_chapter_and_leads_to_the_section_that_shows_it(tmp_path, monkeypatch):
    said = {"predicted": "1", "measured": "1.01", "verdict": "holds ± 5%", "machine": "M, 2 cores", "versions": "V 1"}
    rows = [{"page": "one.ipynb", "claim": claim, **said} for claim in ("a < b", "never shown")]
    rows.append({"page": "one.ipynb", "claim": "late", **said, "verdict": BUSY})
    (tmp_path / "claims.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("BOOK_CLAIMS", str(tmp_path / "claims.jsonl"))
    pages = {
        "index": "# Home\n\n```{toctree}\none\nall\n```\n",
        "one": f"# One\n\n## First\n\nText.\n\n## The bytes\n\n{SHOWN}",
        "all": "# All\n\n```{claims}\n```\n",
    }
    site = build(tmp_path / "site", pages, ["book_claims"])
    page = soup(site, "all")
    assert page.find("th", scope="rowgroup").a["href"] == "one.html"
    first, second, late = page.select("table.claims tbody tr")[1:]
    assert second.select_one("td.ok") and late.select_one("td.busy").get_text() == BUSY
    assert [td.get_text() for td in first.select("td")] == ["a < b", "1", "1.01", "holds ± 5%"]
    assert first.a["href"] == "one.html#the-bytes" and second.a is None
    assert (
        "2 claims hold; 1 more not measured here: the machine was busy. Measured on M, 2 cores, V 1."
        in page.get_text()
    )
