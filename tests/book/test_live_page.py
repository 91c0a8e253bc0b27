"""Pages that live in the browser: who gets their HTML and scripts, and what they say where scripts are off."""

import pytest

from tests.book.book_project import BOOK, build, load

PAGES = {"planner": "python -m lib.planner", "workshop": "workshop(text, Par(4, 6))"}


@pytest.mark.parametrize("directive", PAGES)
def test_a_page_with_the_directive_has_its_html_and_scripts_and_no_other_has(directive, tmp_path):
    pages = {"index": "# Home\n\n```{toctree}\nlive\n```\n", "live": f"# Live\n\n```{{{directive}}}\n```\n"}
    extension = load(f"book_{directive}")
    out = build(tmp_path, pages, [extension.__name__], html_static_path=[str(BOOK / "static")])
    index, live = ((out / f"{name}.html").read_text() for name in pages)
    assert extension.html() in live and len(extension.SCRIPTS) >= 2
    for script in extension.SCRIPTS:
        assert f'defer="defer" src="_static/{script}' in live and script not in index


@pytest.mark.parametrize(("directive", "command"), PAGES.items())
def test_without_a_script_it_names_the_command(directive, command, opened):
    assert command in opened(load(f"book_{directive}").html(), java_script_enabled=False).inner_text("body")
