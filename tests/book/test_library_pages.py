"""The built pages of the library, as a reader finds them: whole, without what Sphinx adds, and each thing said once."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from tests.book.book_project import build, load, soup

library = load("book_library")
located = load("book_interface").located
ROOT = Path(library.ROOT)
OURS = ("lib.", "course.", "book.")
AS_FOR = re.compile(r"\bas for (the )?$")

pytestmark = pytest.mark.slow("builds all pages of the library")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every page of the library by name, built as the book builds it, in a project of its own."""
    names = sorted(path.stem for path in (ROOT / "book" / "library").glob("*.rst"))
    texts = {f"book/library/{n}.rst": (ROOT / f"book/library/{n}.rst").read_text(encoding="utf-8") for n in names}
    listed = "\n".join(f"book/library/{name}" for name in names)
    texts |= {"index": f"# I\n\n```{{toctree}}\nbook/loops\n{listed}\n```\n", "book/loops": "# L\n"}
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    kinds = ("autodoc_", "default_role", "python_", "add_module_names", "toc_object_entries")
    settings = {key: value for key, value in config.items() if key.startswith(kinds)}
    site = build(tmp_path_factory.mktemp("library"), texts, ["book_library"], **settings)
    return {name: soup(site / "book" / "library", name) for name in names}


def text_of(tag) -> str:
    return re.sub(r"\s+", " ", tag.get_text()).strip()


def entries(pages, kind=""):
    """Path and entry of everything that is described."""
    for page in pages.values():
        for dt in page.select(f"dl.py{kind} > dt[id]"):
            yield dt["id"], dt.find_next_sibling("dd")


def fields(entry, title):
    found = (dl for dl in entry.find_all("dl", class_="field-list") if dl.find_parent("dl").dd is entry)
    return [dt.find_next_sibling("dd") for dl in found for dt in dl.find_all("dt") if text_of(dt) == f"{title}:"]


def test_a_class_shows_its_bases(pages):
    silent = []
    for kind in (".class", ".exception"):
        for path, entry in entries(pages, kind):
            has_bases = located(path).__mro__[1:-1]
            silent += [path] if has_bases and not text_of(entry).startswith("Bases: ") else []
    assert silent == []


def test_no_sentence_is_taken_for_a_type(pages):
    titles = {text_of(dt) for page in pages.values() for dt in page.select("dl.field-list > dt")}
    assert titles <= {"Parameters:", "Attributes:", "Returns:", "Yields:", "Raises:", "Example:"}


def test_what_is_returned_is_said_whole(pages):
    lost = []
    for path, entry in entries(pages):
        said = inspect.getdoc(located(path)) or "" if inspect.isroutine(located(path)) else ""
        if match := re.search(r"^Returns:\n((?:    .*\n?)+)", said, re.MULTILINE):
            wanted, there = (re.sub(r"\W", "", text) for text in (match[1], text_of(entry)))  # quotes are made curly
            lost += [path] if wanted not in there else []
    assert lost == []


def test_arguments_with_one_text_are_one_entry(pages):
    twice = []
    for path, entry in entries(pages):
        for field in fields(entry, "Parameters") + fields(entry, "Attributes"):
            texts = [text_of(li).partition(" – ")[2] for li in field.find_all("li")]
            twice += [path for a, b in zip(texts, texts[1:], strict=False) if a and a == b]
    assert twice == []


def test_no_field_has_a_text_of_pythons(pages):
    assert [name for name, page in pages.items() if "Alias for field number" in page.get_text()] == []


def test_where_a_text_refers_to_another_it_leads_there(pages):
    """`as for X` has the text of X in its place, or a link to it."""
    dead = []
    for name, page in pages.items():
        for said in page.find_all(string=AS_FOR):
            dead += [f"{name}: {text_of(said.parent)}"] if said.next_sibling.name != "a" else []
    assert dead == []


def test_what_a_user_needs_comes_first_and_is_not_listed_twice(pages):
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    chapter = next(c for part in parts for c in part["chapters"] if c["file"] == "book/library/index")
    assert chapter["sections"][0] == {"file": "book/library/user"}
    assert len(pages["user"].find_all("h2")) == 10
    paths = [path for path, _ in entries(pages)]
    assert len(paths) == len(set(paths))


def test_each_of_the_ten_has_all_that_it_inherits_errors_and_an_example(pages):
    page = {"user": pages["user"]}
    said = dict(entries(page))
    for cls in (located(path) for path, _ in entries(page, ".class")):
        ours = [one for one in cls.__mro__ if one.__module__.startswith(OURS)]
        wanted = {
            name
            for one in ours
            for name, x in vars(one).items()
            if not name.startswith("_") and (inspect.isfunction(x) or isinstance(x, property | classmethod))
        }
        path = f"{cls.__module__}.{cls.__qualname__}"
        assert {f"{path}.{name}" for name in wanted} <= said.keys()
    assert [path for path, entry in said.items() if not text_of(entry)] == []
    assert not pages["user"].find_all(string=AS_FOR), "here, a text that others have too is said again"
    fsdp = said["lib.data_parallel.fsdp.FSDP"]
    assert {"optimizer", "trained", "units"} <= {text_of(b) for b in fields(fsdp, "Attributes")[0].find_all("strong")}
    for section in pages["user"].find_all("section")[1:]:
        titles = {text_of(dt) for dt in section.select("dl.field-list > dt")}
        assert {"Parameters:", "Raises:", "Example:"} <= titles, section["id"]


def test_internals_are_folded_and_nothing_private_is_shown(pages):
    assert [path for path, _ in entries(pages) if path.rpartition(".")[2].startswith("_")] == []
    for name in pages.keys() - {"user"}:
        for section in pages[name].select("section section"):
            module, described = text_of(section.h2).rstrip("¶"), section.select("dl.py > dt[id]")
            folded = section.select("details.internals dl.py > dt[id]")
            assert len(folded) == (0 if module in library.imported() else len(described)), module
