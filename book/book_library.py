"""The pages of the library: every module of a room, on its page. Exercises are left out: they hold answers.

A page says `.. room:: lib.cost`, or `.. room:: lib` for the files of the root, and its modules are listed when it is
read, from the files that are there: none can be forgotten. What a user calls is on a page of its own, which says
`.. whole:: lib.mesh.Mesh`: there a class has all that it inherits, and the room only leads there. Of a room's modules,
those that no page of the book imports are internals, and folded.

On all pages the name of a public thing, such as `GPT`, `comm.all_reduce` or `lib/mesh.py`, is a link to its
documentation: outside of the library, where a page first mentions it.
"""

import inspect
import re
import sys
from collections import ChainMap, Counter
from collections.abc import Iterator
from functools import cache
from html import escape

from book_docstrings import rst
from book_interface import bases, completed, doc, home, interface, located
from docutils import nodes
from live_page import ROOT
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

ROOM = re.compile(r"^\.\. room:: ([\w.]+)$", re.MULTILINE)
WHOLE = re.compile(r"^\.\. whole:: ([\w.]+)$", re.MULTILINE)
USER = "book/library/user"
ANSWERS = "course.exercises"
PAGES = ("chapters/*.md", "solutions/*.md", "book/*.md")
IMPORTS = re.compile(r"^ *from ((?:lib|course|book)[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
NAMED = 6  # so many names stand on what is folded


# ---- what a page lists ----------------------------------------------------------------------------------------------


def modules_of(room: str) -> list[str]:
    """The modules of a folder and of those inside it; of lib itself, only its own files."""
    folder = ROOT.joinpath(*room.split("."))
    files = folder.glob("*.py") if room == "lib" else folder.rglob("*.py")
    names = sorted(".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files)
    return [name for name in names if name != "lib" and not name.startswith(ANSWERS)]


@cache
def for_users() -> tuple[str, ...]:
    """What the page for users lists, by path."""
    return tuple(WHOLE.findall((ROOT / f"{USER}.rst").read_text(encoding="utf-8")))


@cache
def for_all() -> dict[str, object]:
    """What the page for users lists, by name: any docstring may refer to it."""
    return {path.rpartition(".")[2]: located(path) for path in for_users()}


def listing(room: str, elsewhere: tuple[str, ...] = ()) -> str:
    """The modules of a room; what is listed elsewhere has a link."""
    parts = []
    for name in modules_of(room):
        title = f"``{name}``"
        others = [path for path in elsewhere if path.rpartition(".")[0] == name]
        # What a module passes on from another one is listed where it is written.
        module = [f".. automodule:: {name}", "   :members:", "   :ignore-module-all:"]
        if others:
            last = [path.rpartition(".")[2] for path in others]
            links = (f":py:obj:`{one} <{path}>`" for one, path in zip(last, others, strict=True))
            module += [f"   :exclude-members: {', '.join(last)}", "", f"   On :doc:`/{USER}`: {', '.join(links)}."]
        parts += [title, "-" * len(title), "", *module, ""]
    return "\n".join(parts)


def whole(path: str) -> str:
    """A function, or a class with all that it inherits from the library."""
    thing = located(path)
    if not inspect.isclass(thing):
        return f".. autofunction:: {path}\n"
    members = ", ".join(interface(thing))
    return f".. autoclass:: {path}\n" + (f"   :members: {members}\n   :undoc-members:\n" if members else "")


def write_listing(app, page, source):
    elsewhere = for_users() if USER in app.env.found_docs else ()
    source[0] = ROOM.sub(lambda match: listing(match[1], elsewhere), source[0])
    source[0] = WHOLE.sub(lambda match: whole(match[1]), source[0])


# ---- what is said of a thing ----------------------------------------------------------------------------------------


def write_docstring(app, what, name, obj, options, lines):
    said = [*lines]
    if what in ("class", "exception") and inspect.isclass(obj):
        said = completed(obj) if name in for_users() else said
        if obj.__mro__[1:-1]:
            said = [f"Bases: {', '.join(f'`{base}`' for base in bases(obj))}.", "", *said]
    elif what in ("method", "property"):
        owner, _, last = name.rpartition(".")
        cls = located(owner)
        if inspect.isclass(cls):
            said = said if any(said) else doc(cls, last)
            if (of := home(cls, last)) is not cls:
                said += ["", ".. rst-class:: where", "", f"Inherited from `{of.__name__}`."]
    module = obj if inspect.ismodule(obj) else inspect.getmodule(obj) or located(name.rpartition(".")[0])
    lines[:] = rst(said, ChainMap(getattr(module, "__dict__", {}), for_all()))


def skip_field(app, what, name, obj, skip, options):
    """Python says of a field of a named tuple that it is an "Alias for field number"; its class says what it means."""
    return True if type(obj).__name__ == "_tuplegetter" else None


# ---- internals are folded -------------------------------------------------------------------------------------------


@cache
def imported() -> frozenset[str]:
    """What the pages of the book import, as written."""
    texts = (path.read_text(encoding="utf-8") for pattern in PAGES for path in ROOT.glob(pattern))
    found = [match for text in texts for match in IMPORTS.findall(text)]
    names = (f"{module}.{name}" for module, listed in found for name in re.findall(r"\w+", listed))
    return frozenset([*(module for module, _ in found), *names])


def fold_internals(app, doctree):
    if not app.env.docname.startswith("book/library/"):
        return
    for section in list(doctree.findall(nodes.section)):
        described = [node for node in section.children if isinstance(node, addnodes.desc)]
        if not described or app.env.docname == USER or section.next_node(nodes.title).astext() in imported():
            continue
        names = [escape(node[0].get("fullname", "")) for node in described]
        listed = ", ".join(f"<code>{name}</code>" for name in names[:NAMED]) + (", …" if names[NAMED:] else "")
        inside = section.children[section.index(described[0]) :]
        start = f'<details class="internals"><summary>Internals: {listed}</summary>'
        section[section.index(described[0]) :] = [
            nodes.raw("", start, format="html"),
            *inside,
            nodes.raw("", "</details>", format="html"),
        ]


# ---- names are links ------------------------------------------------------------------------------------------------


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
    if page.startswith("book/tiny"):  # its names are those of tiny.py
        return
    objects = app.env.get_domain("py").objects
    names = names_of(objects)
    if page.startswith("book/library/"):
        return link_in_library(app, doctree, page, objects, names)
    if page.startswith(("exercises/", "solutions/")):  # there, `weights` or `clip` is the reader's
        names = {name: found for name, found in names.items() if found.objtype != "function" or "." in name}
    for code in list(doctree.findall(nodes.literal)):
        found = names.pop(code.astext().removesuffix("()"), None)
        if found and not isinstance(code.parent, nodes.reference | nodes.title):
            link(app, page, code, found)


def link_in_library(app, doctree, page, objects, names):
    """Every mention, but not of a thing in its own entry: a bare name is that of the module, or else a class.

    A bare word that is a function elsewhere is mostly an argument, such as `shard`.
    """
    often = Counter(path.rpartition(".")[2] for path, found in objects.items() if found.objtype != "module")
    for code in list(doctree.findall(nodes.literal)):
        said = code.astext().removesuffix("()")
        signatures = _signatures(code)
        found = next((objects[path] for path in _paths(signatures, said) if path in objects), None)
        if found is None and said in names and often[said] < 2:
            is_sure = said != code.astext() or not said.isidentifier()
            found = names[said] if is_sure or names[said].objtype in ("class", "exception") else None
        own = {name for signature in signatures for name in signature.get("ids", ())}
        if found and found.node_id not in own and not isinstance(code.parent, nodes.reference | nodes.title):
            link(app, page, code, found)


def _signatures(node: nodes.Node) -> list[addnodes.desc_signature]:
    """Those of the entries that a node is in, the innermost first."""
    found = []
    while node := node.parent:
        found += [node[0]] if isinstance(node, addnodes.desc) else []
    return found


def _paths(signatures: list[addnodes.desc_signature], said: str) -> Iterator[str]:
    """What a bare name may be in its entry: of the same class, or of the same module."""
    for signature in signatures:
        around = signature.get("fullname", "").rpartition(".")[0]
        yield ".".join(filter(None, (signature.get("module"), around, said)))


def link(app, page, code, found):
    code.replace_self(make_refnode(app.builder, page, found.docname, found.node_id, code.deepcopy()))


def setup(app):
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    for extension in ("sphinx.ext.autodoc", "sphinx.ext.viewcode"):
        app.setup_extension(extension)
    # All is listed where it is written. Following a default value, such as `Works.compared = run_loop`, to its module
    # would send readers of that module's source back to places on this page that do not exist.
    app.config.viewcode_follow_imported_members = False
    app.connect("source-read", write_listing)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-docstring", write_docstring)
    app.connect("doctree-read", fold_internals)
    app.connect("doctree-resolved", link_names)
    return {"version": "2", "parallel_read_safe": True}
