"""What Jupyter Book and its theme leave to do: pages that ask no other host for anything, in the book's own style."""

import re
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent


def add_static_folders(app):
    # Not the usual _static/: Jupyter Book loads every script it finds there on every page.
    app.config.html_static_path += [str(HERE / "static"), str(HERE / "vendor")]
    app.add_css_file("book.css", priority=900)  # after the theme's own


def set_theme_options(app, config):
    # Here and not in _config.yml, where they would replace all that Jupyter Book derives from the rest of that file.
    options = config.html_theme_options
    options.update(logo={"text": config.project}, show_toc_level=2)
    if "example.invalid" in options["repository_url"]:
        # Until `make repository` has set an address, a link to it would lead nowhere.
        options.update(repository_url="", use_repository_button=False, use_issues_button=False, launch_buttons={})


def remove_thebe(app, config):
    # Jupyter Book always loads it; switched off, it still puts an error into every page's console.
    for listeners in app.events.listeners.values():
        listeners[:] = [listener for listener in listeners if listener.handler.__module__ != "sphinx_thebe"]
    app.registry.css_files[:] = [entry for entry in app.registry.css_files if "thebe" not in entry[0]]


def name_answers(app, doctree):
    # A cell that is folded whole (tag hide-cell) holds the answer to a question.
    for cell in doctree.findall(nodes.container):
        if cell.get("hide_mode") == "all":
            cell["prompt_show"], cell["prompt_hide"] = "Show the answer", "Hide the answer"


# What no setting of the theme turns off. It sends its icons twice, as a font and as 1.5 MB of script, where the font is
# enough, and it preloads that font in a way that a page read from the disk reports as an error.
UNWANTED = re.compile(r'<link rel="preload" as="font"[^>]*>\s*|<script src="[^"]*fontawesome[^"]*"></script>\s*')


def tidy_pages(app, exception):
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        text = UNWANTED.sub("", text)
        text = text.replace('role="doc-biblioentry"', 'role="listitem"')  # docutils gives a role that is deprecated
        page.write_text(text, encoding="utf-8")


def setup(app):
    app.connect("config-inited", set_theme_options, priority=900)
    app.connect("config-inited", remove_thebe, priority=900)
    app.connect("builder-inited", add_static_folders)
    app.connect("doctree-read", name_answers)
    app.connect("build-finished", tidy_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
