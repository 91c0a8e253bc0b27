"""The system's Chromium, driven by playwright, for the site check and the screenshots.

`python tools/browser.py` says so when there is none: tests that need it are then skipped.
"""

import functools
import http.server
import shutil
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

# The first has no window, and takes a quarter less time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def open_browser():
    """A headless browser that starts as root and asks no other host for anything."""
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=quiet)
        yield browser
        browser.close()


@contextmanager
def serve(folder: Path, at: str = "/"):
    """The folder, on a local port of the system's choosing; yields the address.

    `at` is the path below which it lies. What is missing is answered with the folder's 404.html, as GitHub Pages does.
    """

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return super().translate_path("/" + path.removeprefix(at) if path.startswith(at) else "/outside")

        def send_error(self, code, *args, **kwargs):
            lost = folder / "404.html"
            if code != 404 or not lost.is_file():
                return super().send_error(code, *args, **kwargs)
            self.send_response(404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(lost.read_bytes())

        def copyfile(self, *args):
            with suppress(ConnectionError):  # a page that is closed waits for nothing
                super().copyfile(*args)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{at.rstrip('/')}"
    server.shutdown()
    server.server_close()


if __name__ == "__main__" and chromium() is None:
    print(
        "NOT RUN: the browser tests. They need Chromium or Chrome "
        "(Debian: apt-get install chromium-headless-shell; Ubuntu: chromium)."
    )
