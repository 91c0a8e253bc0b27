"""The glossary: every chapter's "Key terms" in one place, and a link from each term to its entry.

A chapter says `**Term**: what it means.` in plain Markdown, one after the other, under the heading "Key terms". In
Colab that is all there is; in the built page each term leads to the glossary, which leads back to the chapters.
"""

import re

from docutils import nodes
from live_page import add_place, places
from sphinx.addnodes import pending_xref
from sphinx.errors import SphinxError

HEADING = "Key terms"


class TermsError(SphinxError):
    category = HEADING


def section_of_terms(doctree: nodes.document) -> nodes.section | None:
    sections = doctree.findall(nodes.section)
    return next((s for s in sections if s[0].astext() == HEADING), None)


def entries(doctree: nodes.document) -> dict[str, list[nodes.Node]]:
    """Term to the nodes of its definition, as the document's key terms give them.

    Raises:
        TermsError: a paragraph there does not read `**Term**: definition. **Term**: ...`.
    """
    section = section_of_terms(doctree)
    found: dict[str, list[nodes.Node]] = {}
    for paragraph in section.findall(nodes.paragraph) if section else []:
        term = None
        for node in [node for node in paragraph.children if node.astext()]:  # the parser leaves empty texts
            if isinstance(node, nodes.strong):
                term = node.astext()
                if term in found:
                    raise TermsError(f"{term!r} is defined twice in one chapter")
                found[term] = []
            elif term is None:
                raise TermsError(f"a paragraph begins with {node.astext()[:40]!r}; write **Term**: definition.")
            else:
                found[term].append(node.deepcopy())
    for term, definition in found.items():
        first = definition[0].astext() if definition else ""
        if not re.match(r":\s*\S", "".join(node.astext() for node in definition)):
            raise TermsError(f"{term!r} is followed by {first[:40]!r}; write **{term}**: definition.")
        if any(isinstance(x, pending_xref | nodes.reference) for node in definition for x in node.findall()):
            raise TermsError(f"the definition of {term!r} holds a link; it is shown on two pages, so say it without")
        definition[0] = nodes.Text(re.sub(r"^:\s*", "", first))
        if isinstance(definition[-1], nodes.Text):
            definition[-1] = nodes.Text(definition[-1].astext().rstrip())
    return found


def text_of(definition: list[nodes.Node]) -> str:
    return " ".join("".join(node.astext() for node in definition).split())


def merge(by_page: dict[str, dict[str, list[nodes.Node]]]) -> dict[str, tuple[list[nodes.Node], list[str]]]:
    """Term to (definition, pages that give it), in the order of the alphabet.

    Raises:
        TermsError: two pages define one term differently, or write it differently.
    """
    merged: dict[str, tuple[list[nodes.Node], list[str]]] = {}
    spelled: dict[str, str] = {}
    for page, terms in sorted(by_page.items()):
        for term, definition in terms.items():
            first = spelled.setdefault(term.casefold(), term)
            if term != first:
                raise TermsError(f"{page} writes {term!r} and {merged[first][1][0]} writes {first!r}; agree on one")
            if term not in merged:
                merged[term] = (definition, [page])
                continue
            if text_of(merged[term][0]) != text_of(definition):
                raise TermsError(
                    f"{term!r} is defined in two ways; agree on one:\n"
                    f"  {merged[term][1][0]}: {text_of(merged[term][0])}\n  {page}: {text_of(definition)}"
                )
            merged[term][1].append(page)
    return dict(sorted(merged.items(), key=lambda item: item[0].casefold()))


def anchor(term: str) -> str:
    return "term-" + re.sub(r"\W+", "-", term.casefold()).strip("-")


def glossary_page(env) -> str | None:
    return next((page for page, lists in env.book_glossary.items() if lists is None), None)


def link(app, here: str, page: str, fragment: str, shown: nodes.Node) -> nodes.reference:
    uri = "" if here == page else app.builder.get_relative_uri(here, page)
    return nodes.reference("", "", shown, internal=True, refuri=f"{uri}#{fragment}")


# ---- while Sphinx builds --------------------------------------------------------------------------------------------


def begin(app):
    if not hasattr(app.env, "book_glossary"):
        app.env.book_glossary = {}  # page to its entries; the glossary itself to None


def collect(app, doctree):
    page = app.env.docname
    if places(doctree, "terms"):
        app.env.book_glossary[page] = None
        return
    try:
        terms = entries(doctree)
    except TermsError as error:
        raise TermsError(f"{page}: {error}") from None
    if terms:
        app.env.book_glossary[page] = terms


def forget(app, env, page):
    env.book_glossary.pop(page, None)


def agree(app, env):
    env.book_terms = merge({page: terms for page, terms in env.book_glossary.items() if terms is not None})
    glossary = glossary_page(env)
    if glossary is not None:  # its definitions may hold mathematics, which it did not have when it was read
        definitions = [node for definition, _ in env.book_terms.values() for node in definition]
        has_math = any(isinstance(node, nodes.math) for node in definitions)
        env.get_domain("math").data["has_equations"][glossary] = has_math
    return [glossary] if glossary is not None else []


def link_terms(app, doctree, page):
    glossary = glossary_page(app.env)
    section = section_of_terms(doctree)
    if glossary is None or section is None or page == glossary:
        return
    for strong in list(section.findall(nodes.strong)):
        where = link(app, page, glossary, anchor(strong.astext()), strong.deepcopy())
        where["classes"].append("term")
        strong.replace_self(where)


def listing(app, page: str) -> nodes.definition_list:
    listed = nodes.definition_list(classes=["glossary"])
    for term, (definition, chapters) in app.env.book_terms.items():
        said = nodes.paragraph("", "", *[node.deepcopy() for node in definition])
        where = nodes.inline(classes=["where"])
        for chapter in chapters:
            title = nodes.Text(app.env.titles[chapter].astext())
            where += [nodes.Text(" "), link(app, page, chapter, "key-terms", title)]
        said += where
        listed += nodes.definition_list_item("", nodes.term("", term, ids=[anchor(term)]), nodes.definition("", said))
    return listed


def setup(app):
    add_place(app, "terms", listing)
    app.connect("builder-inited", begin)
    app.connect("doctree-read", collect)
    app.connect("env-purge-doc", forget)
    app.connect("env-updated", agree)
    app.connect("doctree-resolved", link_terms)
    return {"version": "1", "parallel_read_safe": False}
