"""What a reader sees of each page of the built book, in numbers: a line a page.

python tools/looks.py [page ...]      # e.g. chapters/03_data_parallelism; default: the first page and the chapters

first       px from the top of a window of 1280 x 900 to the first picture
pictures    share of the height that is picture
without     windows in the longest stretch without one
cut         outputs, formulas and code that their place cuts, at 1280 and at 390 px; code may scroll by itself
tabs        presses of Tab up to the first control of the page's own
leaks       answers whose fold ends before the next heading or question
kB          of its HTML, compressed
"""

import gzip
import sys

from set_repository import ROOT

from browser import chromium, open_browser, serve

SITE = ROOT / "_build" / "html"
WINDOW = 900
PICTURES = "figure, .pbh-explorer, .pbh-player, .workshop, .will-it-fit"
LOOK = """(pictures) => {
  const article = document.querySelector("article.bd-article"), top = article.getBoundingClientRect().top + scrollY;
  const seen = (part) => part.checkVisibility() && part.getBoundingClientRect().height > 40;
  const outer = [...article.querySelectorAll(pictures)].filter((p) => seen(p) && !p.parentElement.closest(pictures));
  const boxes = outer.map((p) => p.getBoundingClientRect()).map((b) => [b.top + scrollY, b.bottom + scrollY])
    .sort((a, b) => a[0] - b[0]);
  const bottom = article.getBoundingClientRect().bottom + scrollY;
  let at = top, gap = 0;
  for (const [from, to] of boxes) { gap = Math.max(gap, from - at); at = Math.max(at, to); }
  gap = Math.max(gap, bottom - at);
  return { first: boxes.length ? Math.round(boxes[0][0]) : null, height: bottom - top, gap,
    pictures: boxes.reduce((sum, [from, to]) => sum + to - from, 0) };
}"""
CUT = """() => {
  const wide = (part) => part.checkVisibility() && part.scrollWidth > part.clientWidth + 2;
  const inside = (selector) => [...document.querySelectorAll("article.bd-article " + selector)];
  return { outputs: inside("div.cell_output pre, .report").filter(wide).length,
    formulas: inside("div.math").filter(wide).length,
    code: inside("div.cell_input pre, div[class*=highlight-] pre").filter(wide).length };
}"""
LEAKS = """() => [...document.querySelectorAll("article.bd-article details.hide.above-input")]
  .filter((fold) => fold.textContent.includes("Show the answer"))
  .map((fold) => fold.closest("div.cell").nextElementSibling)
  .filter((next) => next && next.tagName !== "SECTION" && !/^\\d/.test(next.querySelector("strong")?.textContent ?? ""))
  .length"""


def tabs(page) -> int:
    """Presses of Tab until something inside the article has the focus."""
    for count in range(1, 60):
        page.keyboard.press("Tab")
        if page.evaluate("!!document.activeElement.closest('article.bd-article')"):
            return count
    return 60


def look(browser, address: str) -> dict:
    found = {}
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": WINDOW})
        page.goto(address, wait_until="networkidle")
        found |= {f"{name} {width}": value for name, value in page.evaluate(CUT).items()}
        if width == 1280:
            found |= page.evaluate(LOOK, PICTURES) | {"leaks": page.evaluate(LEAKS), "tabs": tabs(page)}
        page.close()
    return found


def main(pages: list[str]) -> None:
    chapters = sorted(path.stem for path in (SITE / "chapters").glob("*.html"))
    print(f"{'':34}first  pictures  without  cut 1280  cut 390 (output formula code)  tabs  leaks  kB")
    with serve(SITE) as url, open_browser() as browser:
        for name in pages or [f"chapters/{stem}" for stem in chapters]:
            seen = look(browser, f"{url}/{name}.html")
            cut = [[seen[f"{part} {width}"] for part in ("outputs", "formulas", "code")] for width in (1280, 390)]
            size = len(gzip.compress((SITE / f"{name}.html").read_bytes(), mtime=0)) / 1000
            print(
                f"{name:32}{seen['first'] or 0:7}{seen['pictures'] / seen['height']:10.0%}{seen['gap'] / WINDOW:9.1f}"
                f"{str(cut[0]):>12}{str(cut[1]):>14}{seen['tabs']:20}{seen['leaks']:7}{size:5.0f}"
            )


if __name__ == "__main__" and chromium():
    main(sys.argv[1:])
