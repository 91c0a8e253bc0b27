"""The book's public address and branch: said once, in _config.yml; everything that repeats them is written here.

make repository URL=https://github.com/ORG/REPO
make repository URL=https://github.com/ORG/REPO BRANCH=v1.0.0

A notebook fetches the library of its branch. A release is a tag, whose notebooks fetch that tag and never change.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://example.invalid/parallel-by-hand"
TAG = re.compile(r"v(\d+\.\d+\.\d+)")
# Text files that repeat the address. Notebooks do too, and are rewritten by tools/notebooks.py.
REPEATED_IN = ["_config.yml", "pyproject.toml", "CITATION.cff", "README.md", "CONTRIBUTING.md", "tools/setup_cell.py"]


def address() -> str:
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    return re.search(r"^repository:\n  url: (\S+)$", config, re.MULTILINE).group(1)


def branch() -> str:
    """Or tag."""
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    return re.search(r"^repository:\n  url: \S+\n  branch: (\S+)$", config, re.MULTILINE).group(1)


def pages(url: str) -> str:
    """Where the built book is read: GitHub Pages of that repository."""
    if url == PLACEHOLDER:
        return f"{url}/pages"
    owner, name = url.rsplit("/", 2)[1:]
    return f"https://{owner.lower()}.github.io/{name}"


def colab(url: str) -> str:
    """What a notebook's path is appended to, to open it in Colab."""
    if url == PLACEHOLDER:
        return f"{url}/colab"
    return url.replace("https://github.com", "https://colab.research.google.com/github", 1) + f"/blob/{branch()}"


def set_address(new: str, new_branch: str = "main") -> None:
    old = address()
    # The longer one first: it begins with the plain address while that is the placeholder.
    swaps = [(derive(old), derive(new)) for derive in (pages, str)]
    for name in REPEATED_IN:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for before, after in swaps:
            text = re.sub(re.escape(before) + r"(?![\w-])", after, text)
        text = re.sub(r'^(  branch: |BRANCH = ")[\w.-]+', rf"\g<1>{new_branch}", text, flags=re.MULTILINE)
        if release := TAG.fullmatch(new_branch):
            text = re.sub(r'^(version(?:: | = "))[\w.-]+', rf"\g<1>{release[1]}", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    url = sys.argv[1].strip().rstrip("/").removesuffix(".git") if len(sys.argv) > 1 else ""
    if url != PLACEHOLDER and not re.fullmatch(r"https://github\.com/[\w-]+/[\w.-]+", url):
        sys.exit(f"make repository URL=https://github.com/ORG/REPO, please: {url or 'nothing'!r} is not of that form")
    new_branch = sys.argv[2] if len(sys.argv) > 2 else "main"
    if new_branch != "main" and not TAG.fullmatch(new_branch):
        sys.exit(f"BRANCH={new_branch}: use main, or the tag of a release, such as v1.0.0")
    set_address(url, new_branch)
    print(f"The address is {url}, {new_branch}; the pages are read at {pages(url)}/")
