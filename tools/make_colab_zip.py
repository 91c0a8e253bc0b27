"""Writes parallel-by-hand.zip: what a notebook needs, to lie beside it where nothing can be cloned.

python tools/make_colab_zip.py            # what `make colab` runs
python tools/make_colab_zip.py x/y.zip    # there; the book's build puts it on the site
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from set_repository import ROOT

from course.release import LIBRARY

NEEDED = [*LIBRARY, "chapters/*.ipynb", "exercises/*.ipynb", "solutions/*.ipynb"]
NEEDED += ["LICENSE", "LICENSE-text", "README.md"]
CACHED = re.compile(r"(^|/)(\.|_build|__pycache__)|\.egg-info")


def files(*patterns: str) -> list[str]:
    """What git has or would add, of all or of these: no caches, no checkpoints, nothing built.

    In a copy without git, whatever is not hidden and not a cache.
    """
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    else:
        found = [path for pattern in patterns or ["*"] for path in ROOT.glob(pattern)]
        names = [path.relative_to(ROOT).as_posix() for top in found for path in (top, *top.rglob("*"))]
        names = [name for name in names if not CACHED.search(name)]
    return sorted(name for name in set(names) if name and (ROOT / name).is_file())


def write(target: Path) -> Path:
    return pack(target, ((name, (ROOT / name).read_bytes()) for name in files(*NEEDED)))


def pack(target: Path, contents: Iterable[tuple[str, bytes]]) -> Path:
    """A zip of these files in a folder parallel-by-hand: the same bytes for the same book."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents:
            entry = zipfile.ZipInfo(f"parallel-by-hand/{name}", (2026, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return target


if __name__ == "__main__":
    target = write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "parallel-by-hand.zip")
    print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB. Put it beside the notebook; in Colab, upload it.")
