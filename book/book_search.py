"""The search: words that people use and the book does not, one result a page, and the sentences that were sought.

Sphinx finds pages that have all words of a question, in no telling order. `search_words.toml` says where people who ask
in their words want to go; the script `search_words.js` puts these places first, and the section whose title has the
words. `search_sections.js` then shows sentences. A place that no page has any more stops the build.
"""

import json
import tomllib
from pathlib import Path

from docutils import nodes

WORDS = Path(__file__).with_name("search_words.toml")
SCRIPTS = "plain_formula.js", "search_words.js", "search_sections.js"


def results(text: str) -> list[tuple[str, str, list[str]]]:
    """(page, section or empty, what people ask) of each entry of the file, in its order.

    Raises:
        ValueError: an entry without words, or a place that comes twice.
    """
    found = [(*(one["place"].split("#") + [""])[:2], one["words"]) for one in tomllib.loads(text)["result"]]
    places = [one[:2] for one in found]
    for page, section, words in found:
        if not words or places.count((page, section)) > 1:
            raise ValueError(
                f"search_words.toml: {page}#{section} has {len(words)} words; give each place once, with words"
            )
    return found


def missing(app, found: list[tuple[str, str, list[str]]]) -> list[str]:
    """Places that no built page has; where a few chapters are built alone, pages that are left out are no fault."""
    known = {}
    for page in {page for page, section, _ in found if section and page in app.env.found_docs}:
        tree = app.env.get_doctree(page)
        known[page] = {name for node in tree.findall(nodes.Element) for name in node.get("ids", [])}
    sections = [(page, section) for page, section, _ in found if section]
    return [f"{page}#{section}" for page, section in sections if section not in known.get(page, {section})]


def help_search(app, pagename, templatename, context, doctree):
    if pagename != "search":
        return
    found = results(WORDS.read_text(encoding="utf-8"))
    if lost := missing(app, found):
        raise ValueError(f"search_words.toml: there is no {', '.join(lost)}; give the section's address of today")
    here = [one for one in found if one[0] in app.env.found_docs]
    app.add_js_file(None, body=f"const searchWords = {json.dumps(here, ensure_ascii=False)};")
    for script in SCRIPTS:
        app.add_js_file(script, loading_method="defer")


def setup(app):
    app.connect("html-page-context", help_search)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
