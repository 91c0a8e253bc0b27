"""Builds some chapters alone, each with its exercises and solutions: python tools/build_chapters.py 03 07

The pages are those of the book, except that a link to a page that is not built leads nowhere.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from execute_chapters import execute_all
from set_repository import ROOT

TARGET = ROOT / "_build" / "chapters"


def find(number: str) -> Path:
    """The notebook of `03`, or of `workshop`."""
    found = [path for path in ROOT.glob("chapters/*.ipynb") if path.stem.split("_")[0] == number]
    if not found:
        known = ", ".join(path.stem.split("_")[0] for path in sorted(ROOT.glob("chapters/*.ipynb")))
        sys.exit(f"There is no chapter {number!r}; there are {known}: make book CHAPTER=03")
    return found[0]


def contents(chapters: list[Path]) -> str:
    """A table of contents: the chapters, with their exercises and solutions."""
    folders = "chapters", "exercises", "solutions"
    pages = [f"{folder}/{one.stem}" for one in chapters for folder in folders if (ROOT / folder / one.name).exists()]
    rest = "".join(f"\n- file: {page}" for page in pages[1:])
    return f"format: jb-book\nroot: {pages[0]}\n" + f"chapters:{rest}\n" * bool(rest)


def main(numbers: list[str]) -> int:
    chapters = [find(number) for number in numbers]
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    os.environ["BOOK_CLAIMS"] = str(TARGET / "claims.jsonl")
    if code := execute_all(chapters, TARGET / "_build" / ".jupyter_cache"):
        return code
    toc = TARGET / "_toc.yml"
    toc.write_text(contents(chapters), encoding="utf-8")
    command = [f"{sys.exec_prefix}/bin/jupyter-book", "build", ".", "--toc", toc, "--path-output", TARGET]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line and "[myst.xref_missing]" not in line]
    if warnings or done.returncode:
        print("\n".join(warnings) or done.stderr, file=sys.stderr)
        return 1
    print("\n".join(f"{TARGET}/_build/html/{path.relative_to(ROOT).with_suffix('.html')}" for path in chapters))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
