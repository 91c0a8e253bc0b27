"""The formula sheet: every formula of lib/cost and of the pages is on it, with the number that it gives."""

import re
from inspect import isfunction

import pytest

from book.trials import exposed, saved
from lib import cost
from lib.cost import bubble
from tests.book.book_project import build, load, soup

formulas = load("book_formulas")
SHEET = (formulas.ROOT / "book" / "formulas.md").read_text(encoding="utf-8")


def formulas_of(module):
    own = (name for name, one in vars(module).items() if isfunction(one) and one.__module__ == module.__name__)
    return [name for name in own if not name.startswith("_")]


OTHERS = {"bubble": bubble, "saved": saved, "exposed": exposed}


@pytest.mark.parametrize(
    ("module", "public"),
    [("cost", cost.__all__), *((name, formulas_of(module)) for name, module in OTHERS.items())],
)
def test_every_formula_of_the_library_is_on_the_sheet(module, public):
    assert len(public) > 1
    assert set(public) - set(re.findall(rf"\{{computed\}} {module}\.(\w+)\(", SHEET)) == set()


def test_every_formula_has_its_mathematics_and_a_number():
    sections = re.split(r"^### ", SHEET, flags=re.MULTILINE)[1:]
    assert [text.splitlines()[0] for text in sections if "$$" not in text or "{computed}" not in text] == []


@pytest.mark.parametrize(
    ("x", "name", "shown"),
    [
        (1.75e9, "wire_bytes", "1.75 GB"),
        (16.0, "state_bytes", "16 B"),
        (1234.5678e12, "state_bytes", "1\u2009235 TB"),
        (0.00375, "comm_s", "3.75 ms"),
        (82e-6, "comm_s", "82 µs"),
        (12.0, "comm_s", "12 s"),
        (0.0, "comm_s", "0 s"),
        (7200.0, "step_s", "2 hours"),
        (3.5 * 365 * 86400, "training_s", "3.5 years"),
        (8.4e22, "training_flops", "8.4 × 10²² FLOP"),
        (0.273, "bubble", "0.273"),
        (70e9, "parameters", "7 × 10¹⁰"),
        ([(2, 3.5), (4, 5.5)], "overlap", "(2, 3.5), (4, 5.5)"),
        ({"a": 2e9, "b": 1e6}, "state_bytes", "a 2 GB, b 1 MB"),
    ],
)
def test_a_result_is_said_with_its_unit(x, name, shown):
    assert formulas.said(x, name) == shown


def test_page_shows_the_number_and_the_chapters_that_use_it(tmp_path, monkeypatch):
    (tmp_path / "chapters").mkdir()
    pages = {
        "index": "# Home\n\n```{toctree}\nchapters/one\nchapters/two\n```\n\n"
        '```{computed} cost.comm_s("send", 1e6, n=2, alpha_s=0, bandwidth_Bps=1e9)\n```\n\n'
        '```{computed} sizes.RECIPES["mixed Adam"].bytes_per_parameter\n:of: Recipe\n```\n\n'
        "```{eval-rst}\n.. py:function:: lib.cost.comm.comm_s(kind)\n"
        ".. py:class:: lib.cost.sizes.Recipe\n```\n",
        "chapters/one": "# One\n\n`x = cost.comm_s(1)`\n",
        "chapters/two": "# Two\n\n`other_cost.comm_s(1)`\n\n`cost.comm_seconds(1)`\n\n`r.bytes_per_parameter`\n",
    }
    monkeypatch.setattr(formulas, "ROOT", tmp_path)
    site = build(tmp_path, pages, ["book_formulas"])
    page = soup(site, "index")
    number = cost.comm_s("send", 1e6, n=2, alpha_s=0, bandwidth_Bps=1e9)
    assert page.select_one("div.computed strong").get_text() == f"{1e3 * number:g} ms"
    function, property_ = ([(a.get_text(), a["href"]) for a in c.select("a")] for c in page.select("div.computed"))
    assert function == [("lib.cost.comm.comm_s", "#lib.cost.comm.comm_s"), ("One", "chapters/one.html")]
    assert property_ == [
        ("lib.cost.sizes.Recipe.bytes_per_parameter", "#lib.cost.sizes.Recipe"),
        ("Two", "chapters/two.html"),
    ]


def test_a_call_of_another_form_is_refused():
    for call in ("1 + 1", "os.getcwd()"):
        with pytest.raises(ValueError, match="begin with one of cost"):
            formulas.compute(call)
