"""The pages of the library: no module is forgotten, and a docstring is what it looks like."""

import re
from pathlib import Path

import yaml

from tests.book.book_project import build, load, soup

library = load("book_library")
PAGES = Path(library.ROOT, "book", "library")


def test_every_module_is_on_exactly_one_page():
    rooms = [room for page in PAGES.glob("*.rst") for room in library.ROOM.findall(page.read_text())]
    listed = [name for room in rooms for name in library.modules_of(room)]
    there = {
        ".".join(path.relative_to(library.ROOT).with_suffix("").parts).removesuffix(".__init__")
        for floor in ("lib", "course", "book/explain", "book/figures", "book/published", "book/trials")
        for path in Path(library.ROOT, floor).rglob("*.py")
    }
    answers = {name for name in there if name.startswith("course.exercises")}
    assert answers and sorted(listed) == sorted(there - {"lib", "course"} - answers)


def test_every_page_is_in_the_table_of_contents():
    parts = yaml.safe_load(Path(library.ROOT, "_toc.yml").read_text())["parts"]
    chapter = next(c for part in parts for c in part["chapters"] if c["file"] == "book/library/index")
    assert {s["file"] for s in chapter["sections"]} == {f"book/library/{p.stem}" for p in PAGES.glob("*.rst")}


def test_listing_reads_as_the_source_says(tmp_path, monkeypatch):
    """Two functions of a module that Sphinx has not seen: signature, sections, code."""
    package = tmp_path / "tiny_library.py"
    package.write_text(
        '"""What |x| is.\n\nThe problem: `a * b`."""\n\nfrom textwrap import dedent\n\n'
        '__all__ = ["second", "first", "dedent"]\n\n\n'
        "def second(n: int, *rest: float) -> float:\n"
        '    """Sum of *rest, as in:\n\n        second(1, *[2.0])\n\n    Args:\n        n: ranks, in `1..8`.\n\n'
        '    Raises:\n        ValueError: no rest_.\n    """\n\n\n'
        'def first():\n    """It comes second."""\n\n\ndef _hidden():\n    """Not shown."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "modules_of", lambda room: ["tiny_library"] if room == "lib.tiny" else [])
    (tmp_path / "site").mkdir()
    pages = {"index.rst": "Home\n====\n\n.. room:: lib.tiny\n"}
    settings = {"default_role": "literal", "autodoc_member_order": "bysource"}
    page = soup(build(tmp_path / "site", pages, ["book_library"], **settings), "index")
    assert [dt["id"] for dt in page.select("dl.py.function > dt")] == ["tiny_library.second", "tiny_library.first"]
    text = re.sub(r"\s+", " ", page.find("body").get_text())
    assert "What |x| is." in text and "Sum of *rest, as in:" in text and "no rest_." in text
    assert page.find("pre").get_text() == "second(1, *[2.0])\n"
    assert {"a * b", "1..8"} <= {code.get_text() for code in page.select("code, span.pre")} | {
        code.get_text(" ") for code in page.select("code")
    }


def test_a_source_leads_back_to_its_own_module_also_where_another_has_its_function_as_a_default(
    tmp_path, monkeypatch
):
    (tmp_path / "tiny_user.py").write_text(
        '"""U."""\n\nfrom tiny_work import work\n\n\n'
        'class User:\n    """A user."""\n\n    #: What it calls.\n    call = work\n'
    )
    (tmp_path / "tiny_work.py").write_text('"""W."""\n\n\ndef work():\n    """It works."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "modules_of", lambda room: ["tiny_user", "tiny_work"])
    (tmp_path / "site").mkdir()
    site = build(tmp_path / "site", {"index.rst": "Home\n====\n\n.. room:: lib.tiny\n"}, ["book_library"])
    back = soup(site / "_modules", "tiny_work").select("a.viewcode-back")
    assert [a["href"] for a in back] == ["../index.html#tiny_work.work"]


def test_the_first_mention_of_a_public_name_on_a_page_leads_to_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "modules_of", lambda room: ["lib.mesh"])
    said = "`mesh.Mesh`, `Mesh()` and `MeshShape`, `lib/mesh.py`; `nothing`, [`Group`](x.md), and again `MeshShape`"
    pages = {"index": f"# `Group`\n\n{said}\n\n```{{toctree}}\nx\nbook/library/r\n```\n", "x": "# X\n\nx\n"}
    pages["book/library/r.rst"] = "Room\n====\n\n.. room:: lib\n"
    page = soup(build(tmp_path, pages, ["book_library"]), "index")
    room = "book/library/r.html#"
    assert [(a.get_text(), a["href"]) for a in page.find("h1").find_next("p").select("a")] == [
        ("mesh.Mesh", f"{room}lib.mesh.Mesh"),
        ("Mesh()", f"{room}lib.mesh.Mesh"),
        ("MeshShape", f"{room}lib.mesh.MeshShape"),
        ("lib/mesh.py", f"{room}module-lib.mesh"),
        ("Group", "x.html"),
    ]


def test_in_an_exercise_a_bare_word_is_the_readers_and_no_function_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "modules_of", lambda room: ["lib.facts"])
    both = ["facts.check_trains", "Fact"]
    said = "`check_trains` and `facts.check_trains`, `Fact`"
    pages = {"index": "# I\n\n```{toctree}\nchapters/x\nexercises/x\nbook/library/r\n```\n"}
    pages |= {f"{folder}/x": f"# X\n\n{said}\n" for folder in ("chapters", "exercises")}
    pages["book/library/r.rst"] = "Room\n====\n\n.. room:: lib\n"
    site = build(tmp_path, pages, ["book_library"])
    for folder, linked in (("chapters", ["check_trains", *both]), ("exercises", both)):
        page = soup(site / folder, "x")
        assert [a.get_text() for a in page.find("h1").find_next("p").select("a")] == linked


def test_in_the_library_a_name_leads_to_what_it_is_there_and_not_to_itself(tmp_path, monkeypatch):
    """A method of its class, a function of its module, any class; a bare word is no function of another module."""
    (tmp_path / "tiny_here.py").write_text(
        '"""H."""\n\n\ndef cut():\n    """Not `cut`, but `Knife` or `tear`."""\n\n\n'
        'class Scissors:\n    """S."""\n\n    def open(self):\n'
        '        """See `close` and `cut` and `sharpen`, `sharpen()`."""\n\n'
        '    def close(self):\n        """C."""\n'
    )
    (tmp_path / "tiny_there.py").write_text(
        '"""T."""\n\n\nclass Knife:\n    """K."""\n\n\ndef sharpen():\n    """S."""\n\n\ndef tear():\n    """T."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "modules_of", lambda room: ["tiny_here", "tiny_there"])
    pages = {"index.rst": "H\n=\n\n.. toctree::\n\n   book/library/r\n"}
    pages["book/library/r.rst"] = "Room\n====\n\n.. room:: lib.tiny\n"
    (tmp_path / "site").mkdir()
    site = build(tmp_path / "site", pages, ["book_library"], default_role="literal", autodoc_member_order="bysource")
    links = soup(site / "book" / "library", "r").select("dl.py dd p a")
    assert [(a.get_text(), a["href"].partition("#")[2]) for a in links] == [
        ("Knife", "tiny_there.Knife"),
        ("close", "tiny_here.Scissors.close"),
        ("cut", "tiny_here.cut"),
        ("sharpen()", "tiny_there.sharpen"),
    ]


def test_a_module_that_no_page_imports_is_folded_behind_the_names_in_it(tmp_path, monkeypatch):
    for name in ("tiny_open", "tiny_inner"):
        (tmp_path / f"{name}.py").write_text(f'"""About {name}."""\n\n\ndef one_{name}():\n    """O."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "modules_of", lambda room: ["tiny_open", "tiny_inner"])
    monkeypatch.setattr(library, "imported", lambda: {"tiny_open"})
    pages = {"index.rst": "H\n=\n\n.. toctree::\n\n   book/library/r\n"}
    pages["book/library/r.rst"] = "Room\n====\n\n.. room:: lib.tiny\n"
    (tmp_path / "site").mkdir()
    page = soup(build(tmp_path / "site", pages, ["book_library"]) / "book" / "library", "r")
    (folded,) = page.select("details.internals")
    assert folded.summary.get_text() == "Internals: one_tiny_inner"
    assert [dt["id"] for dt in folded.select("dl.py > dt")] == ["tiny_inner.one_tiny_inner"]
    assert "About tiny_inner." not in folded.get_text() and page.find("dt", id="tiny_open.one_tiny_open")


def test_pages_are_read_for_what_they_import():
    assert {"lib.comm", "lib.data_parallel.fsdp", "lib.data_parallel.fsdp.FSDP"} <= library.imported()
    assert "lib.runtime.fork_server" not in library.imported()
