"""Builds the book without its solutions, for students: python tools/student_site.py

The folder _build/student/ gets a copy of what the pages are made of, without solutions/, and nothing in it links there.
What is not named here is not copied: homeworks, tests, and whatever else a teacher keeps beside the book.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from make_colab_zip import files
from set_repository import ROOT

from course.release import LIBRARY

PAGES = *LIBRARY, "book", "chapters", "exercises", "tools", "_config.yml", "_toc.yml", "tiny.py"
BESIDE = "LICENSE", "LICENSE-text", "README.md", "constraints.txt", "pyproject.toml", "requirements.txt"
TARGET = ROOT / "_build" / "student"
LINK = re.compile(r" See also the \[solutions\]\([^)]*\)\.")


def copy(target: Path) -> None:
    """The book without its solutions, in a new folder."""
    shutil.rmtree(target, ignore_errors=True)
    for name in files(*PAGES, *BESIDE):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    toc = target / "_toc.yml"
    toc.write_text("".join(line for line in toc.open(encoding="utf-8") if "solutions/" not in line), encoding="utf-8")
    for path in target.glob("exercises/*.ipynb"):
        text, count = LINK.subn("", path.read_text(encoding="utf-8"))
        if count != 1:
            raise ValueError(f"{path.name} has {count} links to its solutions, and one is expected: mend LINK")
        notebook = json.loads(text)
        del notebook["metadata"]["generated"]  # names the file with the answers
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    copy(TARGET)
    for command in (
        [sys.executable, "tools/execute_chapters.py"],
        [f"{sys.exec_prefix}/bin/jupyter-book", "build", ".", "-W", "--keep-going"],
    ):
        if code := subprocess.run(command, cwd=TARGET).returncode:
            sys.exit(code)
    print(f"The book without its solutions: {TARGET / '_build' / 'html' / 'index.html'}")
