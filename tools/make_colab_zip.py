"""Writes parallel-by-hand.zip: what a notebook needs, to be uploaded beside it where nothing can be cloned."""

import subprocess
import zipfile

from set_repository import ROOT

NEEDED = ["lib", "chapters/*.ipynb", "exercises/*.ipynb", "solutions/*.ipynb", "LICENSE", "README.md"]
TARGET = ROOT / "parallel-by-hand.zip"

# What git knows or would add: no caches, no checkpoints, nothing built.
listing = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *NEEDED],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout  # fmt: skip
names = [name for name in sorted(set(listing.split("\0"))) if name and (ROOT / name).is_file()]
with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED) as archive:
    for name in names:
        archive.write(ROOT / name, f"parallel-by-hand/{name}")
print(f"{TARGET.name}: {len(names)} files, {TARGET.stat().st_size / 1e3:.0f} kB")
