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

    def __init__(self, browser, base: str, name: str, width: int = 1280, scheme: str = "light"):
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("origin", ["server", "disk"])
@pytest.mark.parametrize("name", PAGES)
def test_page_is_quiet_and_fits(browser, bases, name, origin, scheme):
    for width in (1280, 390):
        with Visit(browser, bases[origin], name, width, scheme) as visit:
            assert visit.outside == [], "asks another host"
            assert visit.errors == [], "errors in the console"
            if name == "index.html":  # a page that only leads to the first chapter
                assert visit.page.url != f"{bases[origin]}/{name}"
            assert visit.page.evaluate("document.documentElement.dataset.theme") == scheme
            wide = visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"at {width} px the page can be scrolled sideways, by {wide} px"


@pytest.mark.parametrize("origin", ["server", "disk"])
@pytest.mark.parametrize("name", PAGES)
def test_every_slider_changes_its_figure_and_caption(browser, bases, name, origin):
    with Visit(browser, bases[origin], name) as visit:
        for slider in visit.page.locator("article input[type=range]").all():
            figure = slider.locator("xpath=ancestor::figure[1]")

            def shown(figure=figure):
                return figure.locator("svg").first.evaluate("e => e.outerHTML"), figure.locator("figcaption").inner_text()

            first = slider.evaluate("e => Number(e.value) > Number(e.min)")
            before = shown()
            slider.focus()
            visit.page.keyboard.press("ArrowLeft" if first else "ArrowRight")
            after = shown()
            label = slider.evaluate("e => e.labels[0]?.innerText")
            assert label, "a slider without a name"
            assert before[0] != after[0], f"slider {label!r}: the figure did not change"
            assert before[1] != after[1], f"slider {label!r}: the caption did not change"
        assert visit.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page_is_accessible(browser, bases, name, scheme):
    with Visit(browser, bases["server"], name, scheme=scheme) as visit:
        visit.page.evaluate(AXE)
        found = visit.page.evaluate("axe.run().then(result => result.violations)")
        ours = [
            f"{rule['id']}: {node['html'][:150]}"
            for rule in found
            if rule["id"] not in THEME_RULES
            for node in rule["nodes"]
        ]
        assert ours == []


def test_words_and_fills_keep_their_contrast_in_the_dark(browser, bases):
    """Figures take their colours from the stylesheet's variables: the dark ones must arrive."""
    with Visit(browser, bases["server"], next(p for p in PAGES if p.startswith("chapters/")), scheme="dark") as visit:
        style = "getComputedStyle(document.documentElement).getPropertyValue('--pbh-backward').trim()"
        assert visit.page.evaluate(style) == "#2f74c0"
