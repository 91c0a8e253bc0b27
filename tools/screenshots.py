"""Pictures of every built page, wide and narrow, light and dark: to look at, never compared.

python tools/screenshots.py [page ...]      # e.g. chapters/03_data_parallelism
python tools/screenshots.py --cover         # the picture in the README: the Explorer of chapter 3
"""

import sys

from set_repository import ROOT

from browser import open_browser, serve

SITE = ROOT / "_build" / "html"
TARGET = ROOT / "screenshots"
SKIPPED = {"index", "404"}


def main(pages: list[str]) -> None:
    built = [
        p.relative_to(SITE).with_suffix("").as_posix() for p in SITE.rglob("*.html") if "_modules" not in p.parts
    ]
    pages = pages or built
    TARGET.mkdir(exist_ok=True)
    with serve(SITE) as url, open_browser() as browser:
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page = context.new_page()
                for name in set(pages) - SKIPPED:
                    page.goto(f"{url}/{name}.html", wait_until="networkidle")
                    page.screenshot(path=TARGET / f"{name.replace('/', '_')}_{width}_{scheme}.png", full_page=True)
                context.close()
    print(f"{TARGET}: {len(list(TARGET.glob('*.png')))} pictures")


def cover() -> None:
    with serve(SITE) as url, open_browser() as browser:
        window = {"width": 1360, "height": 900}
        page = browser.new_page(viewport=window, device_scale_factor=1.2, color_scheme="light")
        page.goto(f"{url}/chapters/03_data_parallelism.html#when-is-communication-hidden", wait_until="networkidle")
        explorer = page.locator(".pbh-explorer").first
        explorer.evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 350)")
        page.wait_for_timeout(500)
        page.screenshot(path=ROOT / "book" / "cover.png")


if __name__ == "__main__":
    cover() if sys.argv[1:] == ["--cover"] else main(sys.argv[1:])
