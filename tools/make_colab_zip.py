"""Writes parallel-by-hand.zip: what a notebook needs, to be uploaded beside it where nothing can be cloned."""

import subprocess
import zipfile
from pathlib import Path

from set_repository import ROOT

NEEDED = ["lib", "chapters/*.ipynb", "exercises/*.ipynb", "solutions/*.ipynb", "LICENSE", "LICENSE-text", "README.md"]


def files(*patterns: str) -> list[str]:
    """What git has or would add, of all or of these: no caches, no checkpoints, nothing built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in {*listing.split("\0")} if name and (ROOT / name).is_file())


def write(target: Path) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in files(*NEEDED):
            archive.write(ROOT / name, f"parallel-by-hand/{name}")
    return target


if __name__ == "__main__":
    target = write(ROOT / "parallel-by-hand.zip")
    print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB. Upload it to Colab, beside the notebook.")
