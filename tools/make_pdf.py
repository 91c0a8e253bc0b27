"""The whole built book as one PDF, printed by Chromium, with bookmarks.

    python tools/make_pdf.py SITE FILE.pdf        # what `make pdf` runs

Each page is printed with the print style of the book; the pages follow each other as the sidebar lists them. A link
from one page to another leads to that page of the PDF. At the end it says how many sheets each chapter takes.
"""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag

from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, Destination, NameObject, TextStringObject
from set_repository import ROOT
from tqdm import tqdm

from browser import open_browser, serve

START = "chapters/00_start.html"
PAPER = {"format": "A4", "print_background": True, "outline": True, "tagged": True}
MARGIN = {"top": "15mm", "bottom": "16mm", "left": "19mm", "right": "19mm"}
LISTED = "links => links.map(link => [link.href.split('#')[0], link.textContent.replace(/\\s+/g, ' ').trim()])"
LEFT_OUT = "book/library/", "book/claims"  # they are looked up, not read
DEEPER = "Going deeper"
MOST = 14  # sheets of a chapter, without "Going deeper", which has sheets of its own


def entries(outline: list) -> Iterator[Destination]:
    """All bookmarks, those of sections too."""
    for entry in outline:
        yield from entries(entry) if isinstance(entry, list) else [entry]


def printed(page, address: str) -> PdfReader:
    """A page of the site on A4."""
    page.goto(address, wait_until="load")
    page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise.then(() => true)")
    page.evaluate("Promise.all([...document.fonts].map(font => font.load()))")  # a fold's formulas need them on paper
    made = PdfReader(io.BytesIO(page.pdf(**PAPER, margin=MARGIN)))
    for entry in entries(made.outline):
        half = entry.title[: len(entry.title) // 2]
        if entry.title == 2 * half:  # a heading that begins a sheet has its words twice in Chromium's bookmark
            entry.node[NameObject("/Title")] = TextStringObject(half)
    return made


def sheets(made: PdfReader) -> tuple[int, int]:
    """The sheets of a chapter, and those of its section "Going deeper", which is the last."""
    begins = [made.get_destination_page_number(one) for one in entries(made.outline) if one.title == DEEPER]
    own = begins[0] if begins else len(made.pages)
    return own, len(made.pages) - own


def main(site: Path, target: Path) -> None:
    """Print every page of the site that its sidebar lists."""
    writer, first = PdfWriter(), {}  # address of a page → the number of its first sheet
    lengths = {}  # title of a chapter → its sheets, and those of "Going deeper"
    with serve(site) as base, open_browser() as browser:
        page = browser.new_page()
        page.goto(f"{base.rstrip('/')}/{START}")
        listed = dict(page.locator(".bd-sidebar-primary nav a").evaluate_all(LISTED))
        listed = {
            address: title for address, title in listed.items() if not any(part in address for part in LEFT_OUT)
        }
        for address, title in tqdm(listed.items(), unit="page"):
            first[address] = len(writer.pages)
            made = printed(page, address)
            writer.append(made, outline_item=title)
            if "/chapters/" in address:
                lengths[title] = sheets(made)
    for sheet in writer.pages:
        for annotation in sheet.get("/Annots", ()):
            link = annotation.get_object()
            address, _ = urldefrag(link.get("/A", {}).get("/URI", ""))
            if address.startswith(base):
                del link["/A"]  # nobody else has this server
            if address in first:
                there = writer.pages[first[address]].indirect_reference
                link[NameObject("/Dest")] = ArrayObject([there, NameObject("/Fit")])
    writer.add_metadata({"/Title": "Parallel by Hand"})
    writer.write(target)
    for title, (own, deeper) in lengths.items():
        more = f", and {deeper} of {DEEPER}" * bool(deeper)
        print(f"{own:4}  {title}{more}" + f"  <- at most {MOST}" * (own > MOST))
    print(f"{len(writer.pages)} sheets, {target.stat().st_size / 1e6:.0f} MB: {target.resolve().relative_to(ROOT)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
