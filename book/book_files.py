"""What lies in the built folder: only what pages use, the library as a zip, and the whole as a zip to be read offline.

The theme brings 2,000 icons as fonts where pages show a dozen, translations into fifty languages, and the sources of
its own scripts. None of that is asked for by a setting, so it is taken out of what was built.
"""

import logging
import re
import shutil
from pathlib import Path

import book_pages  # noqa: F401 it lets the tools be found
from book_previews import FOLDER
from fontTools import subset
from fontTools.ttLib import TTFont
from make_colab_zip import pack, write

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it says of each table of a font that it was cut

ZIP = "parallel-by-hand-pages.zip"
NOT_IN_ZIP = (ZIP, "404.html", "lost.html", "sitemap.xml", "objects.inv", ".buildinfo", "cover.png")
UNUSED = ["**/*.map", "_static/locales", "_static/*macros.html", "_static/vendor/fontawesome/*/js"]

FONTS = re.compile(r"@font-face\{[^}]*\}")
GLYPH = re.compile(r'((?:\.fa-[\w-]+:{1,2}before,?)+)\{content:"\\([0-9a-f]+)"\}')
FACE = '@font-face{{font-family:"{family}";font-weight:{weight};font-display:block;src:url(../webfonts/{name}.woff)}}'
FACES = {
    "fa-solid-900": ("Font Awesome 6 Free", 900),
    "fa-regular-400": ("Font Awesome 6 Free", 400),
    "fa-brands-400": ("Font Awesome 6 Brands", 400),
}


def remove_unused(site: Path) -> None:
    for pattern in UNUSED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def icons_used(site: Path, sheet: str) -> dict[str, int]:
    """Class to code point for the icons that any page, script or style sheet of the site names."""
    codes = {
        name: int(code, 16) for classes, code in GLYPH.findall(sheet) for name in re.findall(r"fa-[\w-]+", classes)
    }
    texts = [*site.rglob("*.html"), *site.glob("_static/*.js"), *site.glob("_static/scripts/*.js")]
    named = {name for path in texts for name in re.findall(r"\bfa-[\w-]+", path.read_text(encoding="utf-8"))}
    found = {name: codes[name] for name in sorted(named & codes.keys())}
    for path in site.glob("_static/styles/*.css"):  # `content: "\f107"`
        for code in re.findall(r'"\\(f[0-9a-f]{3})"', path.read_text(encoding="utf-8")):
            found.setdefault(code, int(code, 16))
    return found


def slim_icons(site: Path) -> None:
    """Cut the icon fonts and their style sheet to the icons that are used."""
    for sheet_path in site.glob("_static/vendor/fontawesome/*/css/all.min.css"):
        sheet = sheet_path.read_text(encoding="utf-8")
        used = icons_used(site, sheet)
        faces = []
        for name, (family, weight) in FACES.items():
            if written := cut_font(sheet_path.parents[1] / "webfonts" / f"{name}.ttf", set(used.values())):
                faces.append(FACE.format(family=family, weight=weight, name=written))
        for font in sheet_path.parents[1].glob("webfonts/*"):
            if font.suffix != ".woff":
                font.unlink()
        sheet = GLYPH.sub(
            lambda match, used=used: match.group() if used.keys() & set(re.findall(r"fa-[\w-]+", match[1])) else "",
            FONTS.sub("", sheet),
        )
        sheet_path.write_text("".join(faces) + sheet, encoding="utf-8")


def cut_font(path: Path, codes: set[int]) -> str:
    """Write a font of only these characters beside the whole one; its name, or "" where it has none of them."""
    font = TTFont(path)
    codes &= set(font.getBestCmap())
    if not codes:
        return ""
    cutter = subset.Subsetter(subset.Options(layout_features=[], hinting=False))
    cutter.populate(unicodes=codes)
    cutter.subset(font)
    font.flavor = "woff"
    font.save(path.with_suffix(".woff"))
    return path.stem


DOWNLOAD = re.compile(r'<a class="offline" href="[^"]*">([^<]*)</a>')


def write_zip(site: Path) -> None:
    """The site as one file; in it, the offer to download it is gone."""
    listed = sorted(path for path in site.rglob("*") if path.is_file())
    named = [(path.relative_to(site).as_posix(), path.read_bytes()) for path in listed]
    kept = [(name, content) for name, content in named if name not in NOT_IN_ZIP and not name.startswith(FOLDER)]
    target = pack(
        site / ZIP,
        (
            (name, DOWNLOAD.sub("You are reading this copy.", c.decode()).encode() if name.endswith(".html") else c)
            for name, c in kept
        ),
    )
    size = f"{target.stat().st_size / 1e6:.1f} MB"
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if DOWNLOAD.search(text):
            page.write_text(
                DOWNLOAD.sub(lambda m: m.group().replace("</a>", f" ({size})</a>"), text), encoding="utf-8"
            )


def finish(app, exception):
    if exception is None and app.builder.name == "html":
        site = Path(app.outdir)
        remove_unused(site)
        slim_icons(site)
        write(site / "parallel-by-hand.zip")
        write_zip(site)


def setup(app):
    app.connect("build-finished", finish, priority=990)  # after all that changes a page
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
