"""A search ends, has a page once, and begins with the place that people mean by their words."""

import pytest

from tests.book.book_project import BOOK, build, load
from tools.browser import serve

PAGES = {
    "index": "# Book\n\n```{toctree}\nsymptoms\nmemory\nmuseum\n```\n",
    "symptoms": "# Symptoms\n\nWhat is wrong?\n\n## No room\n\nThe device says so.\n\n## A hang\n\nNothing moves.\n",
    "memory": "# Memory\n\nWhat is out of reach.\n\n## Room on a device\n\nA constructor takes room there.\n",
    "museum": "# Museum\n\n## The room of a router\n\nA hang, and memory, and what is out of the way.\n",
}
WORDS = """
[[result]]
place = "symptoms#no-room"
words = ["out of memory", "oom"]

[[result]]
place = "museum"
words = ["memory", "router"]
"""


def make(folder, words=WORDS):
    (folder / "words.toml").write_text(words, encoding="utf-8")
    extension = load("book_search")
    before, extension.WORDS = extension.WORDS, folder / "words.toml"
    try:
        look = {"html_theme": "sphinx_book_theme", "html_static_path": [str(BOOK / "static")]}
        more = {"html_search_scorer": str(BOOK / "scorer.js"), "html_show_search_summary": False}
        return build(folder, PAGES, ["book_search"], **look, **more)
    finally:
        extension.WORDS = before


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with serve(make(tmp_path_factory.mktemp("site"))) as address:
        yield address


@pytest.fixture
def asked(browser, site):
    page, errors = browser.new_page(), []
    page.set_default_timeout(10_000)  # ms
    page.on("pageerror", lambda error: errors.append(str(error)))

    def ask(words: str) -> list[str]:
        """The addresses of all results."""
        page.goto(f"{site}/search.html?q={words}")
        page.get_by_text("Search finished").or_(page.get_by_text("did not match")).wait_for()
        assert errors == []
        links = page.locator("#search-results li > a")
        return [a.split("/")[-1] for a in links.evaluate_all("all => all.map((a) => a.href)")]

    yield ask
    page.close()


@pytest.mark.parametrize(("words", "found"), [("constructor", ["memory.html"]), ("__proto__", []), ("tostring", [])])
def test_a_word_that_every_object_has_is_a_word(asked, words, found):
    assert [address.split("#")[0] for address in asked(words)] == found


def test_what_people_mean_comes_first_and_the_longer_phrase_before_the_shorter(asked):
    assert asked("CUDA: out of memory")[:2] == ["symptoms.html#no-room", "museum.html#the-room-of-a-router"]
    assert asked("oom")[0] == "symptoms.html#no-room" and asked("routers")[0].startswith("museum.html")


def test_a_section_with_the_words_in_its_title_comes_before_pages_with_them_in_their_text(asked):
    assert asked("room device")[0] == "memory.html#room-on-a-device"


def test_each_page_is_there_once(asked):
    for words in ("memory", "hang", "room", "out of memory"):
        pages = [address.split("#")[0] for address in asked(words)]
        assert pages and len(pages) == len(set(pages)), words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (WORDS.replace("no-room", "much-room"), "there is no symptoms#much-room"),
        (WORDS.replace('["memory", "router"]', "[]"), "museum# has 0 words"),
        (WORDS.replace('"museum"', '"symptoms#no-room"'), "give each place once"),
    ],
)
def test_a_place_that_is_not_there_stops_the_build(tmp_path, words, message):
    with pytest.raises(Exception, match=message):
        make(tmp_path, words)


def test_a_page_that_is_not_built_is_left_out(tmp_path):
    text = (make(tmp_path, WORDS.replace('"museum"', '"elsewhere#far"')) / "search.html").read_text(encoding="utf-8")
    assert "no-room" in text and "elsewhere" not in text


def test_each_page_of_the_file_is_a_page_of_the_book():
    """A build leaves out pages that it does not have, because it may be of a few chapters."""
    extension = load("book_search")
    pages = {page for page, *_ in extension.results(extension.WORDS.read_text(encoding="utf-8"))}
    lost = [page for page in pages if not any((BOOK.parent / f"{page}.{kind}").exists() for kind in ("md", "ipynb"))]
    assert len(pages) > 10 and lost == []


def test_a_page_and_a_place_in_it_are_two_places(tmp_path):
    both = WORDS + '\n[[result]]\nplace = "symptoms"\nwords = ["what is wrong"]\n'
    assert "what is wrong" in (make(tmp_path, both) / "search.html").read_text(encoding="utf-8")
