"""What Jupyter Book and its theme leave to do: pages that ask no other host for anything, in the book's own style."""

import json
import posixpath
import re
import shutil
import sys
from functools import cache
from html import escape, unescape
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tools"))
from alone import in_book  # noqa: E402


def restore_links(app, docname, source):
    """A notebook's text is for those who have it alone; a page has links to others, and what the site fills."""
    if not app.env.doc2path(docname).endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = in_book("".join(cell["source"]), f"{docname}.ipynb")
    source[0] = json.dumps(notebook)


def add_static_folders(app):
    # Not the usual _static/: Jupyter Book loads every script it finds there on every page.
    app.config.html_static_path += [str(HERE / "static"), str(HERE / "vendor")]
    app.add_css_file("book.css", priority=900)  # after the theme's own
    for script in ("sidebar.js", "open_folds.js"):
        app.add_js_file(script, loading_method="defer")


def set_theme_options(app, config):
    # Here and not in _config.yml, where they would replace all that Jupyter Book derives from the rest of that file.
    config.html_search_scorer = str(HERE / "scorer.js")
    config.html_show_search_summary = False  # search_sections.js shows sentences; Sphinx would show code and buttons
    options = config.html_theme_options
    # navbar_persistent: the theme it inherits from puts a second search bar across every page.
    options.update(logo={"text": config.project}, show_toc_level=2, navbar_persistent=[])
    if "example.invalid" in options["repository_url"]:
        # Until `make repository` has set an address, a link to it would lead nowhere.
        options.update(repository_url="", use_repository_button=False, use_issues_button=False, launch_buttons={})


def remove_thebe(app, config):
    # Jupyter Book always loads it; switched off, it still puts an error into every page's console.
    for listeners in app.events.listeners.values():
        listeners[:] = [listener for listener in listeners if listener.handler.__module__ != "sphinx_thebe"]
    app.registry.css_files[:] = [entry for entry in app.registry.css_files if "thebe" not in entry[0]]


def fold_answers(app, doctree):
    """A cell that is folded whole (tag hide-cell) holds the answer to a question, and so does what stands below it.

    The answer ends with the next heading or the next question, a paragraph that begins with a bold number.
    """
    for cell in list(doctree.findall(nodes.container)):
        if cell.get("hide_mode") != "all":
            continue
        cell["prompt_show"], cell["prompt_hide"] = "Show the answer", "Hide the answer"
        while (behind := cell.next_node(descend=False, siblings=True)) and not _begins_anew(behind):
            behind.parent.remove(behind)
            cell += behind


def _begins_anew(node: nodes.Node) -> bool:
    words = node.children if isinstance(node, nodes.paragraph) else []
    first = next((part for part in words if part.astext()), None)  # MyST begins it with a text of no characters
    return isinstance(node, nodes.section) or isinstance(first, nodes.strong) and first.astext()[:1].isdigit()


OPTION = re.compile(r'<details class="option">(<summary>.*?</summary>)\s*(?=(Right\b)?)', re.DOTALL)


def rewrite(doctree, pattern: re.Pattern, by) -> None:
    """Replace a pattern in the HTML that a page brings itself."""
    for raw in doctree.findall(nodes.raw):
        raw.rawsource = pattern.sub(by, raw.astext())
        raw.children = [nodes.Text(raw.rawsource)]


def mark_options(app, doctree, docname):
    """An option of a question says by its class whether it is the right one: once opened, it bears ✓ or ✗.

    Those of a guess, which is a quotation, are a row; pressing one closes the others.
    """
    rewrite(doctree, OPTION, lambda m: f'<details class="option {"right" if m[2] else "wrong"}">{m[1]}')
    quoted = [part for quote in doctree.findall(nodes.block_quote) for part in quote.children]
    for number, raw in enumerate(part for part in quoted if isinstance(part, nodes.raw)):
        named = raw.astext().replace("<details ", f'<details name="guess-{number}" ')
        raw.children = [nodes.Text(f'<div class="guess">{named}</div>')]


COLAB = re.compile(r'<a class="colab" href="([^"]*)">[^<]*</a>')


def offer_links(app, doctree, docname):
    """The small line of a chapter leads to its exercises.

    As long as there is no public address, it also offers the notebook, in place of a link to Colab.
    """
    start = app.builder.get_relative_uri(docname, app.config.root_doc)
    folder = app.builder.get_relative_uri(docname, "index").removesuffix("index.html")
    links = f'<a class="colab" href="{folder}_sources/{docname}.ipynb" download>Download the notebook</a>'
    links += f' <a class="colab" href="{start}#how-to-run-it">How to run it</a>'
    chapter, more = re.match(r"chapters/(\d\d)c?_", docname), ""
    for exercises in (page for page in app.env.found_docs if chapter and page.startswith(f"exercises/{chapter[1]}_")):
        more = f' <a class="colab" href="{app.builder.get_relative_uri(docname, exercises)}">Exercises</a>'
    rewrite(doctree, COLAB, lambda m: (links if "example.invalid" in m[1] else m[0]) + more)


# ---- what a page says about itself to those who pass on a link to it -----------------------------------------------

LONGEST = 200  # characters of a description; what is longer is cut by those who show it
LEAD = re.compile(r'<p class="lead">(.*?)</p>', re.DOTALL)


def lead_of(doctree: nodes.document) -> str:
    """The page's lead, as plain text; empty if there is none."""
    leads = (LEAD.search(raw.astext()) for raw in doctree.findall(nodes.raw))
    return next((" ".join(unescape(re.sub(r"<[^>]+>", "", match[1])).split()) for match in leads if match), "")


def description(doctree: nodes.document) -> str:
    """The page's question, which its lead asks; where there is none, its first paragraph."""
    first = next((paragraph.astext() for paragraph in doctree.findall(nodes.paragraph)), "")
    lead = lead_of(doctree) or " ".join(first.split())
    return lead if len(lead) <= LONGEST else lead[:LONGEST].rsplit(" ", 1)[0].rstrip(",;:.") + " …"


def share_sidebar(drawn: dict):
    """The theme draws the sidebar anew for each page; the same one goes beside all source pages of a folder."""

    def share(app, pagename, templatename, context, doctree):
        if pagename.startswith("_modules/"):
            context["toctree"] = drawn.setdefault(posixpath.dirname(pagename), cache(context["toctree"]))

    return share


def walk_chapters(app, pagename, templatename, context, doctree):
    """Previous and next lead from chapter to chapter; exercises, solutions and what goes deeper hang beside theirs."""
    start = app.config.root_doc
    listed = app.env.toctree_includes.get(start, ())  # a page that is built alone has none
    chapters = [start, *(page for page in listed if page.startswith("chapters/"))]
    name = pagename.removeprefix("exercises/").removeprefix("solutions/").removeprefix("chapters/")
    mine = pagename if pagename in chapters else None
    mine = mine or next((page for page in chapters if page.startswith(f"chapters/{name[:2]}")), None)
    if mine is None:
        return
    at = chapters.index(mine)
    before = at - 1 if mine == pagename else at
    for name, place in (("prev", before), ("next", at + 1)):
        if 0 <= place < len(chapters):
            link = app.builder.get_relative_uri(pagename, chapters[place])
            context[name] = {"link": link, "title": escape(app.env.titles[chapters[place]].astext())}
        elif name == "prev":
            context[name] = None


def offer_pictures(app, pagename, templatename, context, doctree):
    """Each picture of a page can be saved."""
    if doctree and any('class="pbh-' in raw.astext() for raw in doctree.findall(nodes.raw)):
        app.add_js_file("save_figure.js", loading_method="defer")


def lay_on_paper(app, pagename, templatename, context, doctree):
    """A chapter that is printed has its answers at its end."""
    if pagename.startswith("chapters/"):
        app.add_js_file("on_paper.js", loading_method="defer")


def describe(app, pagename, templatename, context, doctree):
    if doctree is None or not (text := description(doctree)):
        return
    context["meta"] = {**(context.get("meta") or {}), "og:description": escape(text)}
    context["metatags"] += f'\n<meta name="description" content="{escape(text)}" />\n'


# ---- the page for an address that leads nowhere ----------------------------------------------------------------------

LOST = """<section id="lost"><h1>There is no such page</h1>
<p>The address is misspelled, or the page has moved. The chapters are listed beside this text (on a phone, behind the
button at the top), and the <a href="search.html">search</a> looks through all of them.</p>
<p><a href="{start}">Begin at the beginning</a></p></section>"""
RELATIVE = re.compile(r'((?:href|src|action|data-content_root)=")(?![a-z]+:|[/#])(?:\./)?')
# On a server of one's own the site lies at the root: there a page with addresses of its own is in that place.
ELSEWHERE = """<script>
if (!location.pathname.startsWith("{root}") && location.pathname !== "/lost.html") location.replace("/lost.html");
</script>"""


def lost_page(app):
    start = app.builder.get_relative_uri("404", app.config.root_doc)
    yield "404", {"title": "There is no such page", "body": LOST.format(start=start)}, "page.html"


def root_lost_page(site: Path, base_url: str) -> None:
    """Make every address on 404.html begin at the site's root: the page is shown wherever something is missing."""
    page = site / "404.html"
    root = urlsplit(base_url).path.rstrip("/") + "/"
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<link rel="canonical"[^>]*>', '<meta name="robots" content="noindex">', text)
    (site / "lost.html").write_text(text, encoding="utf-8")
    text = RELATIVE.sub(rf"\g<1>{root}", text)
    page.write_text(re.sub("<head[^>]*>", rf"\g<0>{ELSEWHERE.format(root=root)}", text, count=1), encoding="utf-8")


# ---- what is put right in the finished pages -------------------------------------------------------------------------

# What no setting of the theme turns off. It sends its icons twice, as a font and as 1.5 MB of script, where the font is
# enough, and it preloads that font in a way that a page read from the disk reports as an error. Live widgets are shown
# by a kernel only; their state would still travel with the page. Nothing here is drawn with sphinx-design.
UNWANTED = re.compile(
    r'<link rel="preload" as="font"[^>]*>\s*|<script src="[^"]*fontawesome[^"]*"></script>\s*'
    r'|<script type="application/vnd\.jupyter\.widget-state\+json">.*?</script>\s*'
    r"|<link [^>]*sphinx-design[^>]*>\s*|<script [^>]*design-tabs[^>]*></script>\s*",
    re.DOTALL,
)
MATHJAX = re.compile(r"<script>window\.MathJax = .*?</script>\s*|<script [^>]*mathjax/[^>]*></script>\s*", re.DOTALL)
# It paints what was searched for on every page that follows, also inside of other words, also in the sidebar.
HIGHLIGHT = re.compile(r"<script [^>]*sphinx_highlight[^>]*></script>\s*")
# A path or a name that is longer than a line would be broken anywhere, also before the full stop that follows it.
LONG_CODE = re.compile(r'(?<=<span class="pre">)[^<]{16,}(?=</span>)')
BREAKS = re.compile(r"[/._=:]+(?=[^/._=:])|(?<=[a-z])(?=[A-Z])")
TIDY = [  # a pattern, and what stands in its place, on every page
    (
        re.compile(r'(?<!class="whole">)(<span class="math [^"]*">[^<]*</span>[.,;:!?)]+)'),
        r'<span class="whole">\1</span>',
    ),
    (LONG_CODE, lambda word: BREAKS.sub(r"\g<0><wbr>", word[0])),
    (re.compile(r"(>https?://[^<]*</a>)\.(?=</p>)"), r"\1"),  # a full stop after an address might be alone on a line
    (UNWANTED, ""),
    (re.compile('role="doc-biblioentry"'), 'role="listitem"'),  # docutils gives a role that is deprecated
    (re.compile('<summary>(?=<span class="toctree-toggle")'), '<summary aria-label="The pages below">'),
    (re.compile(r'<th class="head[^"]*"><p></p></th>'), "<td></td>"),  # the corner of a table: it heads nothing
    (re.compile(r"<title>([^<]*) &#8212; \1</title>"), r"<title>\1</title>"),  # the first page has the book's title
]
HOME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
{tags}
<meta http-equiv="refresh" content="0; url={start}"></head>
<body><p><a href="{start}">{title}</a></p></body></html>
"""


LISTED = re.compile(r'(<li class="toctree-l1[^"]*"><a class="[^"]*" href="([^"]*)">)(?!<span class="number">)')


def number_chapters(text: str, name: str) -> str:
    """Chapters in the sidebar get the number that the text calls them by; it is that of their file.

    Once: a build that goes on from an older one keeps pages that have theirs.
    """

    def numbered(match: re.Match) -> str:
        file = name if match[2] == "#" else match[2]
        chapter = re.search(r"(?:^|/)chapters/(\d\dc?)_|^(\d\dc?)_", file)
        number = (chapter[1] or chapter[2]).lstrip("0") if chapter else ""
        in_folder = chapter and (chapter[1] or name.startswith("chapters/"))
        return f'{match[1]}<span class="number">{number}</span> ' if in_folder and number else match[1]

    return LISTED.sub(numbered, text)


def tidy_pages(app, exception):
    if exception is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for pattern, by in TIDY:
            text = pattern.sub(by, text)
        if page.name != "search.html":
            text = HIGHLIGHT.sub("", text)
        if 'class="math' not in text:
            text = MATHJAX.sub("", text)  # else the first page has it, as it leads to pages with mathematics
        text = number_chapters(text, page.relative_to(site).as_posix())
        page.write_text(text, encoding="utf-8")
    root_lost_page(site, app.config.html_baseurl)
    shutil.copyfile(HERE / "cover.png", site / "cover.png")  # shown where someone passes on a link
    # The root leads on to the first page; whoever passes on its address means that page.
    start = app.builder.get_relative_uri("index", app.config.root_doc)
    first = (site / start).read_text(encoding="utf-8")
    tags = re.findall(
        r'<meta (?:property="og:|name="(?:description|twitter:))[^>]*>|<link rel="canonical"[^>]*>', first
    )
    home = HOME.format(title=escape(app.config.project), tags="\n".join(tags), start=start)
    (site / "index.html").write_text(home, encoding="utf-8")


def setup(app):
    app.connect("config-inited", set_theme_options, priority=900)
    app.connect("config-inited", remove_thebe, priority=900)
    app.connect("builder-inited", add_static_folders)
    app.connect("source-read", restore_links)
    app.connect("doctree-read", fold_answers)
    app.connect("doctree-resolved", mark_options)
    app.connect("doctree-resolved", offer_links)
    app.connect("html-page-context", describe, priority=400)  # before the extension that writes the og: tags
    app.connect("html-page-context", share_sidebar({}), priority=400)  # before the theme, which calls it
    app.connect("html-page-context", walk_chapters)
    app.connect("html-page-context", offer_pictures)
    app.connect("html-page-context", lay_on_paper)
    app.connect("html-collect-pages", lost_page)
    app.connect("build-finished", tidy_pages, priority=900)  # after index.html is written
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
