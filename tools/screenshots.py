"""Pictures of every built page, wide and narrow, light and dark: to look at, never compared.

python tools/screenshots.py [page ...]      # e.g. chapters/03_data_parallelism
"""

import sys
from pathlib import Path

from browser import open_browser, serve

ROOT = Path(__file__).resolve().parent.parent
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


if __name__ == "__main__":
    main(sys.argv[1:])
