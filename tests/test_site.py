"""The built book, in a real browser: every page, from a server and from the disk, with the network cut off.

`make site` builds on what `make book` left in _build/html. Without it, or without Chromium, nothing is checked here.
"""

import os
from pathlib import Path

import pytest

from tools.browser import chromium, open_browser, serve

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(os.environ.get("SITE", ROOT / "_build" / "html"))
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if "_static" not in p.parts)
PAGES = [name for name in PAGES if name != "index.html"]  # which only leads to the first chapter
AXE = (ROOT / "tests" / "vendor" / "axe.min.js").read_text(encoding="utf-8")
# Both are the theme's own: the label of its search and "show code" buttons, and its logo outside of any landmark.
THEME_RULES = {"label-content-name-mismatch", "region"}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not PAGES, reason="no built book: make book"),
    pytest.mark.skipif(chromium() is None, reason="no Chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def bases():
    with serve(SITE) as url:
        yield {"server": url, "disk": SITE.as_uri()}


class Visit:
    """One page, opened: what it asked other hosts for, and what its console complained of."""

    def __init__(self, browser, base: str, name: str, scheme: str = "light"):
        self.outside: list[str] = []
        self.errors: list[str] = []
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
        if route.request.url.startswith((base, "data:", "blob:")):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.context.close()


@pytest.mark.parametrize(("origin", "scheme"), [("server", "light"), ("disk", "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_page_is_quiet_and_fits(browser, bases, name, origin, scheme):
    with Visit(browser, bases[origin], name, scheme) as visit:
        assert visit.page.evaluate("document.documentElement.dataset.theme") == scheme
        for width in (1280, 390):
            visit.page.set_viewport_size({"width": width, "height": 900})
            wide = visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"at {width} px the page can be scrolled sideways, by {wide} px"
        assert visit.outside == [], "asks another host"
        assert visit.errors == [], "errors in the console"


@pytest.mark.parametrize("name", [name for name in PAGES if 'type="range"' in (SITE / name).read_text("utf-8")])
def test_every_slider_changes_its_figure_and_caption(browser, bases, name):
    with Visit(browser, bases["disk"], name) as visit:
        for slider in visit.page.locator("article input[type=range]").all():
            figure = slider.locator("xpath=ancestor::figure[1]")

            def shown(figure=figure):
                picture = figure.locator("svg").first.evaluate("e => e.outerHTML")
                return picture, figure.locator("figcaption").inner_text()

            at_least = slider.evaluate("e => Number(e.value) === Number(e.min)")
            before = shown()
            slider.focus()
            visit.page.keyboard.press("ArrowRight" if at_least else "ArrowLeft")
            after = shown()
            label = slider.evaluate("e => e.labels[0]?.innerText")
            assert label, "a slider without a name"
            assert before[0] != after[0], f"slider {label!r}: the figure did not change"
            assert before[1] != after[1], f"slider {label!r}: the caption did not change"
        assert visit.errors == []


@pytest.mark.parametrize("origin", ["server", "disk"])
def test_index_leads_to_the_first_page(browser, bases, origin):
    with Visit(browser, bases[origin], "index.html") as visit:
        visit.page.wait_for_url("**/chapters/00_start.html")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_accessible(browser, bases, name):
    with Visit(browser, bases["server"], name) as visit:
        visit.page.evaluate(AXE)
        for scheme in ("light", "dark"):
            visit.page.emulate_media(color_scheme=scheme)
            visit.page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
            rules = visit.page.evaluate("axe.run().then(result => result.violations)")
            found = {f"{rule['id']}: {node['html'][:200]}" for rule in rules for node in rule["nodes"]}
            assert {text for text in found if text.split(":")[0] not in THEME_RULES} == set(), scheme
