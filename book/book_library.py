"""The pages of the library: every module of a room, on its page. Exercises are left out: they hold answers.

A page says `.. room:: lib.cost`, or `.. room:: lib` for the files of the root, and its modules are listed when it is
read, from the files that are there: none can be forgotten. Docstrings are plain text with `code` in backticks and the
sections of Google's style.

On all other pages the name of a public thing, such as `GPT`, `comm.all_reduce` or `lib/mesh.py`, is a link to its
documentation where a page first mentions it.
"""

import re
import sys

from docutils import nodes
from live_page import ROOT
from sphinx.util.nodes import make_refnode

ROOM = re.compile(r"^\.\. room:: ([\w.]+)$", re.MULTILINE)
ANSWERS = "course.exercises"
MARKS = re.compile(
    r"(`[^`]*`)|([*|\\]|(?<=\w)_(?!\w))"
)  # what reStructuredText would take for markup, outside of code


def modules_of(room: str) -> list[str]:
    """The modules of a folder and of those inside it; of lib itself, only its own files."""
    folder = ROOT.joinpath(*room.split("."))
    files = folder.glob("*.py") if room == "lib" else folder.rglob("*.py")
    names = sorted(".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files)
    return [name for name in names if name != "lib" and not name.startswith(ANSWERS)]


def listing(room: str) -> str:
    parts = []
    for name in modules_of(room):
        title = f"``{name}``"
        # What a module passes on from another one is listed where it is written.
        module = [f".. automodule:: {name}", "   :members:", "   :ignore-module-all:"]
        parts += [title, "-" * len(title), "", *module, ""]
    return "\n".join(parts)


def write_listing(app, page, source):
    source[0] = ROOM.sub(lambda match: listing(match.group(1)), source[0])


def plain(lines: list[str]) -> list[str]:
    """Docstring lines in which only backticks, lists, sections and indented code mean anything."""
    result, code = [], None  # code: the indentation of the line that announced it
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if code is not None and (not line.strip() or indent > code):
            result.append(line)
            continue
        code = None
        result.append(MARKS.sub(lambda m: m.group(1) or "\\" + m.group(2), line))
        after = lines[i + 1 : i + 3]
        if line.strip() and len(after) == 2 and not after[0].strip() and after[1].startswith(" " * (indent + 1)):
            result += [] if line.endswith(":") else ["", " " * indent + ":"]
            result[-1] += ":"
            code = indent
    return result


def escape_docstring(app, what, name, obj, options, lines):
    lines[:] = plain(lines)


def names_of(objects: dict) -> dict:
    """How a page calls what the Python domain has found: a file by its path, else by its last name or last two."""
    names = {}
    for path, found in objects.items():
        room, last = path.split(".")[:-1], path.rpartition(".")[2]
        if path.startswith("course.check."):
            continue  # a grader is called as the exercise that it asks for
        if found.objtype == "module":
            names[path.replace(".", "/") + ".py"] = found
        elif found.objtype in ("class", "exception", "function", "method") and room:
            names[f"{room[-1]}.{last}"] = found
            if found.objtype != "method":
                names[last] = found
    return names


def link_names(app, doctree, page):
    if page.startswith(("book/library/", "book/tiny")):  # the names on the second are those of tiny.py
        return
    names = names_of(app.env.get_domain("py").objects)
    if page.startswith(("exercises/", "solutions/")):  # there, `weights` or `clip` is the reader's
        names = {name: found for name, found in names.items() if found.objtype != "function" or "." in name}
    for code in list(doctree.findall(nodes.literal)):
        found = names.pop(code.astext().removesuffix("()"), None)
        inside = isinstance(code.parent, nodes.reference | nodes.title)
        if found and not inside:
            link = make_refnode(app.builder, page, found.docname, found.node_id, code.deepcopy())
            code.replace_self(link)


def setup(app):
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    for extension in ("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"):
        app.setup_extension(extension)
    # All is listed where it is written. Following a default value, such as `Works.compared = run_loop`, to its module
    # would send readers of that module's source back to places on this page that do not exist.
    app.config.viewcode_follow_imported_members = False
    app.connect("source-read", write_listing)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon's
    app.connect("doctree-resolved", link_names)
    return {"version": "1", "parallel_read_safe": True}
