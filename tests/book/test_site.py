"""The built book, in a real browser: every page, from a server and from the disk, with the network cut off.

`make site` builds on what `make book` left in _build/html. Without it, or without Chromium, nothing is checked here.
What needs no browser is read from the files. A page is opened once from a server, in light, and once from the disk, in
dark; all tests of a page share these two visits, in one of the processes that share out the pages.
"""

import gzip
import json
import os
import re
import zipfile
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup
from fontTools.ttLib import TTFont
from matplotlib.image import imread

from tests.book.book_project import AXE, load
from tests.book.test_repository import tool
from tools.browser import serve

make_pdf, typed_numbers = tool("make_pdf"), tool("typed_numbers")

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(os.environ.get("SITE", ROOT / "_build" / "html"))
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
BASE_URL = CONFIG["html"]["baseurl"]
MOST_BYTES = 300_000  # of a page's own HTML, compressed

HTML = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
SOURCES = [name for name in HTML if name.startswith("_modules/")]  # the library's code, which the theme lays out
GONE = {f"{page}.html": f"{to['']}.html" for page, to in load("book_moved").moved_places().items() if "" in to}
LISTED = [
    name for name in HTML if name not in {"index.html", "404.html", "lost.html", "search.html", *SOURCES, *GONE}
]
PAGES = [*LISTED, *(name for name in HTML if name == "search.html")]
CHAPTERS = [name for name in PAGES if re.match(r"chapters/(?!00)\d\dc?_", name)]
# Both are the theme's own: the label of its search and "show code" buttons, and its logo outside of any landmark.
THEME_RULES = {"label-content-name-mismatch", "region"}


def each(names: list[str]) -> list:
    """One process takes all tests of a page: it is opened and parsed once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


pytestmark = pytest.mark.skipif(not PAGES, reason="no built book: make book")


# ---- what the files say ---------------------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


SCRIPT = re.compile(r"<script\b.*?</script>|<style\b.*?</style>|<!--.*?-->", re.DOTALL)
LINK = re.compile(r'<(?:a|link|img|form|script)\b[^>]*?\b(?:href|src|action)="([^"]*)"')


@cache
def ids(path: Path) -> frozenset:
    return frozenset(re.findall(r'\bid="([^"]*)"', SCRIPT.sub("", path.read_text(encoding="utf-8"))))


def broken_links(site: Path) -> list[str]:
    """Every href, src and action of every page that leads to no file of the site, or to no place in it."""
    broken = []
    for page in site.rglob("*.html"):
        content = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<script\b[^>]*? src="([^"]*)"', content)
        for link in {unescape(link) for link in [*loaded, *LINK.findall(SCRIPT.sub("", content))]}:
            path, fragment = urldefrag(link)
            if not link or urlsplit(link).scheme or link.startswith("//"):
                continue
            path = unquote(urlsplit(path).path)
            root = urlsplit(BASE_URL).path  # 404.html begins its links at the root
            target = site / path.removeprefix(root) if path.startswith("/") else page.parent / path if path else page
            if not target.is_file():
                broken.append(f"{page.relative_to(site)}: {link}")
            elif fragment and target.suffix == ".html" and unquote(fragment) not in ids(target):
                broken.append(f"{page.relative_to(site)}: {link} (no such place)")
    return broken


def test_every_link_inside_the_site_leads_somewhere():
    assert broken_links(SITE) == []


def test_numbers_in_the_text_are_bound_to_the_run():
    """Each is computed on its page or has a source; of all that were a fifth larger, 95 % would be noticed."""
    unbound, total, missed = {}, 0, 0
    for name in (name for name in PAGES if name.startswith("chapters/")):
        page = Path(name).stem
        html = (SITE / name).read_text(encoding="utf-8")
        found, of_page, of_them_missed = typed_numbers.examine(html, typed_numbers.cited(page))
        unbound |= {page: found} if found else {}
        total, missed = total + of_page, missed + of_them_missed
    assert unbound == {}
    assert total > 300 and missed <= 0.05 * total


def article(name: str) -> BeautifulSoup:
    return parsed(SITE / name).select_one("article.bd-article")


@pytest.mark.parametrize("name", each(LISTED))
def test_headings_are_in_order_and_pictures_are_named(name):
    headings = article(name).find_all(re.compile(r"^h[1-6]$"))
    levels = [int(tag.name[1]) for tag in headings]
    assert levels.count(1) == 1 and levels[0] == 1
    steps = zip(levels, levels[1:], headings[1:], strict=False)
    assert [tag.get_text() for before, level, tag in steps if level > before + 1] == []
    assert [str(tag)[:100] for tag in article(name).find_all("img") if not tag.get("alt", "").strip()] == []
    drawings = [svg for svg in article(name).find_all("svg") if svg.find_parent("svg") is None]
    images = [
        svg.find_parent(role="img") or svg for svg in drawings
    ]  # an Explorer's box has the name of what is in it
    nameless = [svg for svg in images if not svg.get("aria-label", "").strip() and not svg.get("aria-hidden")]
    assert [str(svg)[:100] for svg in nameless] == []


def section(page: BeautifulSoup, title: str) -> BeautifulSoup | None:
    heading = next((h for h in page.find_all(["h2", "h3"]) if h.get_text().rstrip("#¶") == title), None)
    return heading and heading.find_parent("section")


def numbered(part: BeautifulSoup) -> list[str]:
    """The paragraphs that begin with a bold number: **1.** or **1. Question**."""
    firsts = [p.find("strong") for p in part.find_all("p") if p.find("strong")]
    return [strong.get_text() for strong in firsts if re.match(r"\d+\.", strong.get_text())]


# These four are cut from two, and share what those had to solve and to ask until each is written anew.
CUT = re.compile(r"chapters/(?:09|10c?|11|12)_")


@pytest.mark.parametrize("name", each(CHAPTERS))
def test_chapter_has_all_its_parts(name):
    page = article(name)
    solved, to_solve, asked = (1, 1, 2) if CUT.match(name) else (2, 3, 3)
    assert re.match(r"Chapter \d+c? · \S", page.select_one("p.kick").get_text()), "the small line above the title"
    assert page.select_one("p.lead").get_text().count("?") >= 1, "the lead asks the chapter's question"
    opening = page.find("strong", string="After this chapter you can")
    assert opening and len(opening.find_next("ul").find_all("li")) >= 3, "objectives"
    assert re.search(r"\d+ minutes to read", page.get_text()), "reading time"
    assert page.select_one("figure").find_parent("div", class_="pbh-guess"), "a guess on the first picture"
    further = SITE.glob(f"{name[:11]}[bc]_*.html")  # what goes deeper, or a second page, may have it
    pages = [page, *(article(one.relative_to(SITE).as_posix()) for one in further)]
    assert any(one.select("figure.pbh-explorer") for one in pages), "an Explorer"
    assert page.select("table.claims"), "a claim"

    examples = section(page, "Worked examples")
    assert examples and len(numbered(examples) or examples.find_all("h3")) >= solved
    practice = section(page, "Practice")
    assert len(numbered(practice)) >= to_solve
    assert len(practice.select("details")) >= to_solve, "answers are folded, and computed by cells"

    quiz = section(page, "Quiz")
    questions = [text.split(".")[0] for text in numbered(quiz)]
    assert questions == list("12345")[: len(questions)] and len(questions) >= asked
    options = quiz.select("details.option")
    assert len(options) >= 2 * len(questions)
    silent = [o.get_text() for o in options if not o.get_text().replace(o.summary.get_text(), "", 1).strip()]
    assert silent == [], "every option says what it gets right or wrong"
    right = [o for o in options if o.get_text().replace(o.summary.get_text(), "", 1).strip().startswith("Right")]
    assert len(right) == len(questions), 'the right option of each question says "Right"'

    terms = section(page, "Key terms")
    assert len(terms.select("a.term")) >= 2 and not terms.select("p > strong"), "each term leads to the glossary"
    papers = section(page, "Papers")
    assert papers.select('a[href^="https://"]')
    whole = parsed(SITE / name)
    listed = whole.select_one(".bd-docs-nav li.current > a").get_text()
    assert f"Chapter {listed.split()[0]} ·" in page.select_one("p.kick").get_text(), "its number, in the sidebar"
    assert whole.select_one("a.left-prev") and whole.select_one("a.right-next")


# Pages whose cells say their kind: tools/page_form.py counts their source, and here is seen what the source cannot say.
IN_FORM = [name for name in CHAPTERS if 'class="folded evidence"' in (SITE / name).read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", each(IN_FORM))
def test_what_is_folded_says_what_it_holds(name):
    page = article(name)
    lines = [line.get_text() for line in page.select("details.evidence > summary")]
    good = re.compile(r"✓ ([Mm]easured: \S|Modelled: \S|Emulated: \S|(\d+) of \2 hold$)|– .* the machine was busy$")
    assert [line for line in lines if not good.match(line)] == []
    tables = [fold.select("table.claims tbody tr") for fold in page.select("details.evidence[open]")]
    assert [len(rows) for rows in tables if len(rows) > 4] == [], "a table that stays open has four rows at most"
    figures = [len(cell.select("figure")) for cell in page.select("div.tag_figure:not(.tag_remove-output)")]
    assert set(figures) <= {1}, "a cell draws one figure: so many does the reading time count"
    assert page.select("figure") == page.select("div.tag_figure figure"), "a cell that draws has the tag figure"


@pytest.mark.parametrize("name", each(LISTED))
def test_page_says_what_it_is_to_those_who_pass_it_on(name):
    head, title = parsed(SITE / name).head, article(name).h1.get_text().rstrip("#¶")
    first = name == "chapters/00_start.html"
    assert head.title.get_text() == (CONFIG["title"] if first else f"{title} — {CONFIG['title']}")
    assert head.find("link", rel="canonical")["href"] == BASE_URL + name
    og = {tag["property"]: tag["content"] for tag in head.find_all("meta", property=True)}
    assert og["og:title"] == title and og["og:url"] == BASE_URL + name
    drawn = article(name).select_one("figure[class^=pbh-]")
    picture = f"previews/{name.removesuffix('html')}png" if drawn else "cover.png"
    assert og["og:image"] == BASE_URL + picture and len(og["og:image:alt"]) > 20
    size = imread(SITE / picture).shape
    assert (og["og:image:height"], og["og:image:width"]) == tuple(map(str, size[:2]))
    assert head.find("meta", attrs={"name": "twitter:card"})["content"] == "summary_large_image"
    lead = article(name).select_one("p.lead") or next(p for p in article(name).find_all("p") if not p.get("class"))
    said = " ".join(lead.get_text().split())
    assert 20 < len(og["og:description"]) <= 202 and said.startswith(og["og:description"].removesuffix(" …"))
    assert head.find("meta", attrs={"name": "description"})["content"] == og["og:description"]
    assert head.find("link", rel="icon")


def test_sitemap_names_every_page_and_nothing_else():
    places = re.findall(r"<loc>([^<]*)</loc>", (SITE / "sitemap.xml").read_text(encoding="utf-8"))
    assert sorted(places) == [BASE_URL + name for name in LISTED]


def test_icons_that_are_shown_are_in_the_fonts_and_no_others():
    home = next(SITE.glob("_static/vendor/fontawesome/*"))
    sheet = (home / "css" / "all.min.css").read_text(encoding="utf-8")
    there = {code for font in home.glob("webfonts/*") for code in TTFont(font).getBestCmap()}
    named = {
        icon
        for name in HTML
        for classes in re.findall(
            r'class="([^"]*\bfa[srb]?\b[^"]*|[^"]*\bfa-(?:solid|regular|brands)\b[^"]*)"', text(name)
        )
        for icon in re.findall(r"fa-(?!solid|regular|brands|lg)[\w-]+", classes)
    }
    assert len(named) > 5
    shown = {icon: re.search(rf'\.{icon}:before[^{{]*\{{content:"\\([0-9a-f]+)"', sheet) for icon in named}
    assert [icon for icon, code in shown.items() if code is None or int(code[1], 16) not in there] == []
    assert len(there) < 40


@cache
def text(name: str) -> str:
    return (SITE / name).read_text(encoding="utf-8")


def test_nothing_lies_in_the_site_that_no_page_uses():
    left = [p.name for p in SITE.rglob("*") if p.suffix in {".map", ".po", ".mo", ".ttf", ".woff2"}]
    assert left == []
    assert [name for name in HTML if re.search(r'class="[^"]*\bsd-', text(name))] == [], "sphinx-design is left out"


def compressed(path: Path) -> int:
    return len(gzip.compress(path.read_bytes(), mtime=0))


@pytest.mark.parametrize("name", each(HTML))
def test_page_is_light(name):
    assert compressed(SITE / name) <= MOST_BYTES


# ---- what a browser shows -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bases():
    with serve(SITE) as url:
        yield {"server": url, "disk": SITE.as_uri()}


class Visit:
    """One page, opened: what it asked other hosts for, and what its console complained of."""

    def __init__(self, browser, base: str, name: str, scheme: str = "light"):
        self.name, self.outside = name, []
        self.errors: list[str] = []
        self.fetched: set[str] = set()
        # Without motion: a colour half-way through its transition has whatever contrast it has.
        window = {"width": 1280, "height": 900}
        self.context = browser.new_context(viewport=window, color_scheme=scheme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.route("**/*", lambda route: self.local_only(route, base))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{base}/{name}", wait_until="load")
        self.page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise.then(() => true)")

    def local_only(self, route, base):
        url = route.request.url
        if url.startswith((base, "data:", "blob:")):
            self.fetched.add(urlsplit(url.removeprefix(base)).path.lstrip("/"))
            route.continue_()
        else:
            self.outside.append(url)
            route.abort()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.context.close()


@pytest.fixture(scope="module", params=each(PAGES))
def served(request, browser, bases):
    with Visit(browser, bases["server"], request.param, "light") as visit:
        yield visit


@pytest.fixture(scope="module", params=each(PAGES))
def from_disk(request, browser, bases):
    with Visit(browser, bases["disk"], request.param, "dark") as visit:
        yield visit


# The theme's containers of the article cut off what is too wide for them; a page so cut cannot be scrolled.
TOO_WIDE = """() => Math.max(...[document.documentElement, ...document.querySelectorAll(
    'main, .bd-content, .bd-article-container, article')].map(e => e.scrollWidth - e.clientWidth))"""


def fits(visit, width: int) -> int:
    """By how much the page can be scrolled sideways, or is cut off."""
    visit.page.set_viewport_size({"width": width, "height": 900})
    return visit.page.evaluate(TOO_WIDE)


def quiet(visit) -> None:
    assert visit.outside == [], "asks another host"
    assert visit.errors == [], "errors in the console"


def test_page_is_quiet_and_fits_every_width(served, say):
    fetched = sum(compressed(SITE / path) for path in served.fetched if (SITE / path).is_file())
    own = compressed(SITE / served.name)
    say(f"{served.name}: {own / 1000:.1f} KB, with all that a first visitor loads {fetched / 1000:.1f}, compressed")
    assert served.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert {width: over for width in (1280, 820, 390, 320) if (over := fits(served, width)) > 0} == {}
    fits(served, 1280)
    quiet(served)


# Figures, also in what is folded, that scroll sideways, stick out of the window, cut off words or write too small.
CUT_OFF = """() => {
    const closed = [...document.querySelectorAll('article details:not([open])')];
    closed.forEach(one => { one.open = true });
    const sticksOut = (box, {left, right}) => box.left < left - 1 || box.right > right + 1;
    const scrolls = e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible';
    const faults = figure => {
        const box = figure.getBoundingClientRect(), found = [];
        if (sticksOut(box, {left: 0, right: innerWidth})) found.push('sticks out of the window');
        for (let e = figure; e.tagName !== 'ARTICLE'; e = e.parentElement)
            if (e.tagName !== 'svg' && scrolls(e)) found.push(`scrolls in ${e.className}`);
        const isClipped = figure.tagName === 'svg' && getComputedStyle(figure).overflowX !== 'visible';
        for (const words of figure.ariaHidden ? [] : figure.querySelectorAll(':scope text')) {
            if (!words.textContent || words.getBoundingClientRect().width === 0) continue;
            if (sticksOut(words.getBoundingClientRect(), isClipped ? box : {left: 0, right: innerWidth}))
                found.push(`cuts off ${words.textContent}`);
            if (parseFloat(getComputedStyle(words).fontSize) * words.getScreenCTM().a < 11.99)
                found.push(`writes too small: ${words.textContent}`);
        }
        return found;
    };
    const figures = [...document.querySelectorAll('article :is(figure, svg, img, canvas)')];
    const seen = figures.filter(e => e.checkVisibility() && !e.ownerSVGElement);
    const found = seen.flatMap(e => faults(e).map(fault => `${e.closest('figure')?.innerText.slice(0, 40)}: ${fault}`));
    closed.forEach(one => { one.open = false });
    return [...new Set(found)];
}"""


def test_no_figure_scrolls_or_is_cut_off_on_a_phone(served):
    fits(served, 390)
    cut = served.page.evaluate(CUT_OFF)
    fits(served, 1280)
    assert cut == []


@pytest.mark.parametrize("name", each(LISTED))
def test_every_frame_of_an_explorer_fits_a_phone(name):
    """A reader sees the first; what the knobs lead to is here."""
    for figure in article(name).select("figure.pbh-explorer"):
        _, narrow, _ = json.loads(figure.select_one('script[type="application/json"]').get_text())["frames"]
        least = [float(re.search(r"min-width:(\d+)px", svg)[1]) for svg in narrow]
        assert max(least) <= 327 and len(set(least)) == 1, "12 pixels for the smallest words, and no frame jumps"


def test_page_is_accessible(served):
    served.page.evaluate(AXE.read_text(encoding="utf-8"))
    colours = {"runOnly": ["color-contrast", "link-in-text-block"]}  # the rest is the same in light and in dark
    for scheme, only in (("light", {}), ("dark", colours)):
        served.page.emulate_media(color_scheme=scheme)
        served.page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        result = served.page.evaluate(
            "only => axe.run(document, only).then(({violations, incomplete}) => ({violations, incomplete}))",
            only | {"resultTypes": ["violations", "incomplete"], "selectors": False, "preload": False},  # no media
        )
        found = {f"{rule['id']}: {node['html'][:200]}" for rule in result["violations"] for node in rule["nodes"]}
        unsure = [(rule, node) for rule in result["incomplete"] for node in rule["nodes"] if node["any"]]
        found |= {  # text in the very colour of its ground, which axe is not sure of
            f"{rule['id']}: {node['html'][:200]}"
            for rule, node in unsure
            if (node["any"][0]["data"] or {}).get("messageKey") == "equalRatio"
        }
        assert {text for text in found if text.split(":")[0] not in THEME_RULES} == set(), scheme
    served.page.emulate_media(color_scheme="light")


A4_PX = 650  # between the margins of make pdf
# What has a frame or a ground of its own, and nothing in it.
EMPTY = """() => [...document.querySelectorAll('article *')].filter((part) => {
    const style = getComputedStyle(part), seen = 'svg, img, input, mjx-container';
    const edges = ['Top', 'Right', 'Bottom', 'Left'].map((side) => style[`border${side}Width`]);
    const framed = edges.some((width) => parseFloat(width)) || !/, 0\\)$|255, 255, 255/.test(style.backgroundColor);
    return framed && part.checkVisibility({ contentVisibilityAuto: true }) && part.getBoundingClientRect().height > 4
        && !part.innerText?.trim() && !part.querySelector(seen) && !part.closest(`${seen}, table, .legend, li`);
}).map((part) => part.outerHTML.slice(0, 120))"""
WIDE = """() => [...document.querySelectorAll('article :is(pre, table, figure, .report, .box)')]
    .filter((part) => part.checkVisibility() && part.getBoundingClientRect().right > innerWidth + 1)
    .map((part) => part.innerText.slice(0, 80))"""


def test_page_prints_black_on_white_without_what_surrounds_it(from_disk):
    fits(from_disk, A4_PX)
    from_disk.page.emulate_media(media="print")
    from_disk.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    hidden = from_disk.page.evaluate("""() => [...document.querySelectorAll(
        '.bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article, .prev-next-footer, .pbh-knob input')]
        .filter(e => e.checkVisibility()).map(e => e.className)""")
    colours = from_disk.page.evaluate("""() => [getComputedStyle(document.body).backgroundColor,
        ...[...document.querySelectorAll('article p, article h2, article pre')].map(e => getComputedStyle(e).color)]""")
    cut = from_disk.page.evaluate("""() => [...document.querySelectorAll('article pre')]
        .filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 80))""")
    empty, wide = (from_disk.page.evaluate(look) for look in (EMPTY, WIDE))
    from_disk.page.evaluate("dispatchEvent(new Event('afterprint'))")
    from_disk.page.emulate_media(media="screen")
    fits(from_disk, 1280)
    assert hidden == [] and empty == []
    assert cut == [] and wide == [], "runs off the paper"
    red, green, blue = (int(x) for x in re.findall(r"\d+", colours[0])[:3])
    assert min(red, green, blue) == 255, colours[0]
    light = {colour for colour in colours[1:] if max(int(x) for x in re.findall(r"\d+", colour)[:3]) > 190}
    assert light == set()


def test_a_chapter_fits_its_sheets(served):
    if served.name in CHAPTERS:
        page = served.context.new_page()
        own, _ = make_pdf.sheets(make_pdf.printed(page, served.page.url))
        page.close()
        assert own <= make_pdf.MOST


def test_page_works_from_the_disk(from_disk):
    assert from_disk.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert {width: over for width in (1280, 390) if (over := fits(from_disk, width)) > 0} == {}
    fits(from_disk, 1280)
    quiet(from_disk)


FIRST_FIGURE = "document.querySelector('article figure').getBoundingClientRect().top + scrollY"
SHOWN_CODE = """() => {
    const code = [...document.querySelectorAll('article div.cell_input')].filter(e => e.checkVisibility());
    const height = code.reduce((sum, e) => sum + e.getBoundingClientRect().height, 0);
    return height / document.querySelector('article').getBoundingClientRect().height;
}"""
MOST_CODE = {"03_data_parallelism": 0.2, "13_3d_parallelism": 0.2, "14_choosing": 0.2}


def test_a_chapter_shows_its_first_figure_soon_and_little_code(from_disk):
    """What is folded is still closed: the tests that open it come after this one."""
    if from_disk.name not in IN_FORM:
        return
    fits(from_disk, 1280)
    assert from_disk.page.evaluate(FIRST_FIGURE) <= 1.5 * 800, "within a screen and a half"
    assert from_disk.page.evaluate(SHOWN_CODE) <= MOST_CODE.get(Path(from_disk.name).stem, 0.3)


# Whether the summary of this number is open; it has the focus then, and everything around it is open.
FOCUSED = """number => {
    const summary = document.querySelectorAll('article details > summary')[number];
    for (let around = summary.parentElement; (around = around.parentElement.closest('details')); ) around.open = true;
    summary.focus();
    return summary.parentElement.open;
}"""


def test_every_answer_opens_by_keyboard(from_disk):
    summaries = from_disk.page.locator("article details > summary")
    for number in range(summaries.count()):
        if summaries.nth(number).evaluate("e => e.parentElement.hidden"):
            continue  # nothing is there to be opened
        was_open = from_disk.page.evaluate(FOCUSED, number)
        from_disk.page.keyboard.press("Enter")
        assert from_disk.page.evaluate(FOCUSED, number) is not was_open, summaries.nth(number).inner_text()
        from_disk.page.keyboard.press("Enter")


# Where a row of options stands, and what the open one says.
CHIPS = """row => [...row.querySelectorAll('summary')].map(chip => {
    const [own, all] = [chip.getBoundingClientRect(), row.getBoundingClientRect()];
    return [own.left - all.left, own.top - all.top, own.width];
})"""
SAID = """row => [...row.querySelectorAll('details[open]')].map(option => {
    const [range, row] = [document.createRange(), option.parentElement], chip = option.querySelector('summary');
    range.selectNodeContents(option);
    range.setStartAfter(chip);
    const { top, left, width } = range.getBoundingClientRect();
    const below = [...row.querySelectorAll('summary')].every(e => e.getBoundingClientRect().bottom <= top);
    const inRow = width > 200 && left - row.getBoundingClientRect().left < 20;
    return [below && inRow, getComputedStyle(chip, '::before').content];
})"""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_guess_is_pressed_without_a_script_and_stays_where_it_is(browser, bases, width):
    context = browser.new_context(java_script_enabled=False, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(f"{bases['disk']}/chapters/05_fsdp.html")
    row = page.locator("div.guess").first
    options, chips = row.locator("details.option"), row.evaluate(CHIPS)
    assert len(chips) >= 3 and row.evaluate(SAID) == []
    for number in range(len(chips)):
        row.locator("summary").nth(number).focus()
        page.keyboard.press("Enter")
        assert row.evaluate(CHIPS) == chips, "the options stand where they stood"
        right = "right" in options.nth(number).get_attribute("class")
        said = row.evaluate(SAID)
        assert said == [[True, '"✓" / "right:"' if right else '"✗" / "wrong:"']], "below them, one at a time"
    context.close()


# The lowest button of the first guess, and what a reader sees of its picture before and after it is pressed.
ASKED = """box => {
    const buttons = [...box.querySelectorAll('.guess button')], bottom = buttons.at(-1).getBoundingClientRect().bottom;
    const shown = box.querySelector('.pbh-player, .pbh-explorer, figure').innerText, hidden = box.className;
    buttons[0].click();
    return [bottom + scrollY, hidden.includes('pbh-asks'), box.className.includes('pbh-asks'), shown];
}"""


@pytest.mark.parametrize("name", each(CHAPTERS))
def test_the_first_screen_ends_below_a_guess_which_opens_its_picture(browser, bases, name):
    with Visit(browser, bases["disk"], name) as visit:
        box = visit.page.locator(".pbh-guess").first
        answer = box.evaluate("b => JSON.parse(b.querySelector(':scope > script').textContent)")
        bottom, closed, still_closed, shown = box.evaluate(ASKED)
        assert bottom <= 900 and closed and not still_closed
        assert answer["options"][answer["right"]][1] not in shown, "why it is right"
        quiet(visit)


SHOWN = """e => { const f = e.closest('figure'), picture = f.querySelector('.pbh-box').innerHTML;
    return [+e.value, picture, f.querySelector('figcaption').innerText, e.getAttribute('aria-valuetext')] }"""
DEAD_MOVES = """e => {
    const figure = e.closest('figure'), knobs = [...figure.querySelectorAll('.pbh-knob')];
    const mine = knobs.indexOf(e.closest('.pbh-knob'));
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const after = data.values.slice(mine + 1).reduce((n, v) => n * v.length, 1), own = data.values[mine].length;
    const moved = new Set();
    data.order.forEach((frame, place) => {
        const i = Math.floor(place / after) % own;
        if (i + 1 === own) return;
        const next = data.order[place + after]; // both drawings, and the sentence
        if (data.frames.every((all) => all[frame] !== all[next])) moved.add(i);
    });
    return data.values[mine].slice(0, -1).filter((_, i) => !moved.has(i));
}"""
BAD_FRAMES = """e => {
    const {frames} = JSON.parse(e.querySelector("script[type='application/json']").textContent);
    const [wides, narrows, sentences] = frames;
    const isBad = svg => new DOMParser().parseFromString(svg, 'image/svg+xml').querySelector('parsererror');
    return sentences.filter((words, i) => !words.trim() || isBad(wides[i]) || isBad(narrows[i]));
}"""


def test_every_value_of_every_slider_can_be_reached_and_shows_something(from_disk):
    folded = from_disk.page.locator("article details:has(.pbh-explorer)")
    folded.evaluate_all("all => all.forEach((one) => { one.open = true })")
    skip = from_disk.page.locator("article .pbh-guess button:text-is('Skip'):visible").first
    while skip.is_visible():
        skip.click()  # of a guess: its sliders come afterwards, and the next one is the first
    for figure in from_disk.page.locator("article figure.pbh-explorer").all():
        assert figure.evaluate(BAD_FRAMES) == []
    for choice in from_disk.page.locator("article fieldset.pbh-choice").all():
        assert choice.evaluate(DEAD_MOVES) == [], f"buttons {choice.inner_text()!r}: some never change what is shown"
        buttons, shown = choice.locator("input"), set()
        at = choice.locator("input:checked").get_attribute("value")
        for i in range(buttons.count()):
            buttons.nth(i).check()
            shown.add(choice.evaluate("e => e.closest('figure').querySelector('.pbh-box').innerHTML"))
        assert len(shown) > 1 or buttons.count() == 1
        buttons.nth(int(at)).check()
    for slider in from_disk.page.locator("article figure.pbh-explorer input[type=range]").all():
        label = slider.evaluate("e => e.labels[0]?.innerText")
        assert label, "a slider without a name"
        start, most = slider.evaluate("e => [Number(e.value), Number(e.max)]")
        slider.focus()
        press = from_disk.page.keyboard.press
        press("Home")
        steps = [slider.evaluate(SHOWN)]
        while steps[-1][0] < most:
            press("ArrowRight")
            steps.append(slider.evaluate(SHOWN))
            assert steps[-1][0] == len(steps) - 1, f"slider {label!r}: the right arrow does not lead one further"
        moves = list(zip(steps, steps[1:], strict=False))
        assert [after[3] for before, after in moves if before[3] == after[3]] == [], f"{label!r}: values said alike"
        # A move may change nothing where the others stand (a step after the last one), but not wherever they stand.
        assert slider.evaluate(DEAD_MOVES) == [], f"slider {label!r}: moves that never change figure and sentence"
        changed = [before[1] != after[1] and before[2] != after[2] for before, after in moves]
        beside = changed[max(start - 1, 0) : start + 1]
        assert any(beside) and 2 * sum(changed) >= len(moves), (
            f"slider {label!r} moves, and little changes: {changed}"
        )
        press("Home")
        assert slider.evaluate(SHOWN) == steps[0]
        press("End")
        assert slider.evaluate(SHOWN) == steps[-1]
        for _ in range(most - start):
            press("ArrowLeft")
    assert from_disk.errors == []


@pytest.mark.parametrize("part", range(4))
def test_pages_of_the_librarys_source_are_quiet_and_fit(browser, bases, part):
    names = SOURCES[part::4]
    with Visit(browser, bases["disk"], names[0], "dark") as visit:
        fits(visit, 390)
        for name in names:
            visit.page.goto(f"{bases['disk']}/{name}", wait_until="load")
            assert fits(visit, 390) <= 0, name
            quiet(visit)


@pytest.mark.parametrize("origin", ["server", "disk"])
def test_index_leads_to_the_first_page(browser, bases, origin):
    with Visit(browser, bases[origin], "index.html") as visit:
        visit.page.wait_for_url("**/chapters/00_start.html")


@pytest.mark.parametrize("origin", ["server", "disk"])
@pytest.mark.parametrize(("name", "now"), GONE.items())
def test_an_old_page_leads_to_its_page_of_today(browser, bases, origin, name, now):
    with Visit(browser, bases[origin], f"{name}#a-section") as visit:
        visit.page.wait_for_url(f"**/{now}#a-section")
        visit.page.wait_for_load_state("load")
        quiet(visit)


@pytest.mark.parametrize("origin", ["server", "disk"])
def test_search_finds_what_a_chapter_says(browser, bases, origin):
    with Visit(browser, bases[origin], "search.html?q=bucket") as visit:
        visit.page.wait_for_selector("#search-results li a")
        found = [a.get_attribute("href") for a in visit.page.locator("#search-results li a").all()]
        assert any("03_data_parallelism.html" in href for href in found)
        visit.page.wait_for_function("document.querySelector('#search-results p').innerText.includes('found')")
        assert "library/" not in found[0], "chapters and the glossary come before the library"
        visit.page.locator("#search-results li a").first.click()
        visit.page.wait_for_selector("article h1")
        assert visit.page.locator(".highlighted").count() == 0
        quiet(visit)


@pytest.mark.parametrize(
    ("words", "page", "section"),
    [
        ("how much memory", "01_memory", ""),
        ("deadlock", "02_collectives", "deadlock"),
        ("buckets", "03_", "gradient-buckets"),
    ],
)
def test_search_begins_with_the_chapter_that_says_it_and_leads_to_the_section(browser, bases, words, page, section):
    with Visit(browser, bases["server"], f"search.html?q={words.replace(' ', '+')}") as visit:
        visit.page.wait_for_selector("#search-results li a[href*='#']")
        first = visit.page.locator("#search-results li a").first
        visit.page.wait_for_function("document.querySelector('#search-results li a').hash")
        assert page in first.get_attribute("href") and f"#{section}" in first.get_attribute("href")
        assert "›" in first.inner_text() or ">" in first.inner_text()
        visit.page.wait_for_selector("#search-results p.context")
        said = visit.page.locator("#search-results p.context").all_inner_texts()
        assert [text for text in said if re.search(r"\\[(a-z]|Show the|How this was", text)] == [], "sentences alone"
        quiet(visit)


@pytest.mark.parametrize("name", [*CHAPTERS[:1], *CHAPTERS[-1:], "book/bibliography.html"])
def test_the_page_one_reads_is_in_view_in_the_sidebar(browser, bases, name):
    with Visit(browser, bases["server"], name) as visit:
        visit.page.set_viewport_size({"width": 1280, "height": 700})
        visit.page.reload(wait_until="load")
        here = visit.page.locator(".bd-sidebar-primary a.current")
        assert 0 < here.bounding_box()["y"] < 690


@pytest.mark.parametrize("at", [urlsplit(BASE_URL).path, "/"])
def test_a_wrong_address_of_any_depth_shows_the_book(browser, at):
    with serve(SITE, at=at) as base:
        with Visit(browser, base, "no/such/page.html") as visit:
            assert visit.page.locator("article h1").inner_text() == "There is no such page"
            assert visit.outside == []
            assert [e for e in visit.errors if "404" not in e] == [], "but for its own status"
            assert len(visit.errors) <= 1 or at == "/", "there the browser asks first where the site was meant to lie"
            style = visit.page.evaluate("getComputedStyle(document.querySelector('.bd-article h1')).fontWeight")
            assert style == "680", "the book's style sheet did not come"
            visit.page.get_by_role("link", name="Begin at the beginning").click()
            visit.page.wait_for_url(f"{base}/chapters/00_start.html")


def test_the_zip_holds_the_whole_site_and_opens_from_the_disk(browser, tmp_path):
    packed = SITE / "parallel-by-hand-pages.zip"
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path)
    site = tmp_path / "parallel-by-hand"
    assert {p.name for p in tmp_path.iterdir()} == {site.name}
    assert [p.name for p in site.rglob("*.zip")] == ["parallel-by-hand.zip"], "the library, to run what was saved"
    assert sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html")) == [
        n for n in HTML if n not in ("404.html", "lost.html")
    ]
    assert broken_links(site) == []
    assert f'<a class="offline" href="../{packed.name}">' in text("book/offline.html")
    assert '<a href="../parallel-by-hand.zip">' in text("book/offline.html")
    with Visit(browser, site.as_uri(), "index.html") as visit:
        visit.page.wait_for_url("**/chapters/00_start.html")
        visit.page.wait_for_load_state("load")
        quiet(visit)


def test_progress_is_remembered_and_a_record_is_read(browser, bases, tmp_path):
    (tmp_path / "record.json").write_text(
        '{"01.1": {"points": 2, "max": 2}, "01.2": {"points": 1, "max": 2}, "99.9": {"points": 1, "max": 1}}'
    )
    (tmp_path / "other.json").write_text("[")
    with Visit(browser, bases["server"], "book/progress.html") as visit:
        page, said = visit.page, visit.page.locator("#progress [role=status]")
        most = sum(map(float, page.locator("#progress input[type=checkbox]").evaluate_all(POINTS)))
        assert said.inner_text() == f"0 of {most:g} points. Next to do: 01.1 state_bytes."
        page.get_by_label("02.1 shift").check()
        page.reload()
        assert page.get_by_label("02.1 shift").is_checked() and said.inner_text().startswith(f"2 of {most:g} points.")
        page.get_by_label("Load a record:").set_input_files(tmp_path / "record.json")
        page.get_by_label("01.1 state_bytes").and_(page.locator(":checked")).wait_for()
        assert said.inner_text() == f"4 of {most:g} points. Next to do: 01.2 lowest_stage."
        with page.expect_download() as saved:
            page.get_by_role("link", name="Save the record").click()
        assert saved.value.suggested_filename == "parallel-by-hand.progress.json"
        kept = json.loads(saved.value.path().read_text())
        assert sorted(kept) == ["01.1", "02.1"] and all(one["points"] == one["max"] for one in kept.values())
        page.get_by_label("Load a record:").set_input_files(tmp_path / "other.json")
        page.get_by_text("other.json is no record of course.check.").wait_for()
        assert page.get_by_label("01.1 state_bytes").is_checked() and visit.errors == []


POINTS = "all => all.map((box) => box.dataset.points)"
