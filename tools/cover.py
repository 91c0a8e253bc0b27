"""The picture in the README: the explorer of chapter 03, from the built book."""

from browser import open_browser, serve
from screenshots import ROOT, SITE

if __name__ == "__main__":
    with serve(SITE) as url, open_browser() as browser:
        page = browser.new_page(
            viewport={"width": 1360, "height": 900}, device_scale_factor=1.2, color_scheme="light"
        )
        page.goto(f"{url}/chapters/03_data_parallelism.html#when-is-communication-hidden", wait_until="networkidle")
        explorer = page.locator(".pbh-explorer").first
        explorer.evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 350)")
        page.wait_for_timeout(500)
        page.screenshot(path=ROOT / "book" / "cover.png")
