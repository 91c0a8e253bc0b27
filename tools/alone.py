"""A page's text in a notebook that is opened alone, in Colab or from a mail.

A link to another page leads to the site; as long as the site has no address, to the notebook that lies beside this one
in the folder of the book. What the site fills becomes words: `{cards}` is a list of the chapters, and `{workshop}`, a
grid that lives in a browser, says where it is. The book reads the notebooks, and takes all of it back. The .md has the
links as they are written, which Git's pages follow.
"""

import posixpath
import re

from set_repository import PLACEHOLDER, ROOT, address, branch, pages

CODE = r"^```.*?^```|`[^`]+`|\$\$.*?\$\$|\$[^$\n]+\$"
WORDS = r"(?:[^][]|\[[^][]*\])+"
LINK = re.compile(
    rf"(?P<code>{CODE})|(?<!!)\[(?P<words>{WORDS})\]\((?![a-z]+:)(?P<to>[^()\s]+)\)"
    r'|<a href="(?![a-z]+:)(?P<href>[^"]*)">(?P<inner>.*?)</a>',
    re.DOTALL | re.MULTILINE,
)
DIRECTIVE = re.compile(r"^```\{(cards|workshop)\}\n```$", re.MULTILINE)
WORDS_OF_IT = re.compile(r"<!-- (cards|workshop) -->\n\n.*?\n\n<!-- end of \1 -->", re.DOTALL)


def alone(text: str, path: str) -> str:
    """The Markdown for the notebook at `path`."""

    def lead(match: re.Match) -> str:
        if match["code"] or address() == PLACEHOLDER:
            return match[0]
        to = online(match["to"] or match["href"], path)
        return f"[{match['words']}]({to})" if match["to"] else f'<a href="{to}">{match["inner"]}</a>'

    def say(match: re.Match) -> str:
        words = {"cards": chapters, "workshop": grid}[match[1]]()
        return f"<!-- {match[1]} -->\n\n{words}\n\n<!-- end of {match[1]} -->"

    return LINK.sub(lead, DIRECTIVE.sub(say, text))


def in_book(text: str, path: str) -> str:
    """The Markdown that `alone` had made the text from."""
    text = WORDS_OF_IT.sub(r"```{\1}\n```", text)
    ours = rf"({re.escape(pages(address()))}/|{re.escape(address())}/blob/{re.escape(branch())}/)([^)\"\s]+)"
    return re.sub(ours, lambda m: relative(m[2], path), text)


def online(to: str, path: str) -> str:
    """The address of a page of the site, or of a file of the repository."""
    to, _, part = to.partition("#")
    to = posixpath.normpath(posixpath.join(posixpath.dirname(path), to)) if to else path
    page, kind = posixpath.splitext(to)
    if kind not in (".ipynb", ".md") or "/" not in page:
        return f"{address()}/blob/{branch()}/{to}"
    return f"{pages(address())}/{page}.html" + f"#{part}" * bool(part)


def relative(to: str, path: str) -> str:
    """What `online` made the end of an address from."""
    to, _, part = to.partition("#")
    to = to.replace(".html", ".md" if to.startswith("book/") else ".ipynb")
    if to == path and part:
        return f"#{part}"
    return posixpath.relpath(to, posixpath.dirname(path)) + f"#{part}" * bool(part)


def chapters() -> str:
    """The chapters as a list of links; the second page of a chapter, as 10c, is below it."""
    pages = sorted(page for page in ROOT.glob("chapters/*.md") if re.match(r"\d\dc?_", page.name))[1:]
    titles = [re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1] for page in pages]
    marks = (f"{int(page.name[:2])}." if page.name[2] == "_" else "    -" for page in pages)
    return "\n".join(f"{m} [{t}]({p.stem}.ipynb)" for m, p, t in zip(marks, pages, titles, strict=True))


def grid() -> str:
    """Where the blocks of a schedule are; without an address, a link would lead a notebook to itself."""
    page = "this page of the book" if address() == PLACEHOLDER else "[this page of the book](workshop.ipynb)"
    return f"The blocks are on {page}, in a browser. A notebook has only their text: see *In a notebook* below."
