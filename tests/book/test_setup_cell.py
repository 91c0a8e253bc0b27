"""The first cell of every notebook, in each place where a reader may run it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lib

ROOT = Path(__file__).resolve().parents[2]
CELL = (ROOT / "tools" / "setup_cell.py").read_text(encoding="utf-8")
PLACEHOLDER = "https://example.invalid/parallel-by-hand"
# Whatever the address is today: these tests must never clone from it.
CELL = re.sub(r'BRANCH = ".*"', 'BRANCH = "main"', CELL)
CELL = re.sub(r'REPOSITORY = ".*"', f'REPOSITORY = "{PLACEHOLDER}"', CELL)
INIT = (ROOT / "lib" / "__init__.py").read_text(encoding="utf-8")
FOUND = "\nimport lib; print('found', lib.__file__)"


@pytest.fixture
def place(tmp_path):
    """An empty folder that nothing of this repository is visible from."""
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def book(folder: Path) -> Path:
    """Of the book's library the first file, in `folder`."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "__init__.py").write_text(INIT)
    return folder / "lib" / "__init__.py"


def run(
    place: Path,
    cell: str = CELL,
    before: str = "",
    path: Path | None = None,
    torch: str | None = "2.8.0",
    python=None,
) -> subprocess.CompletedProcess:
    """The cell in a Python of its own, without the book in its environment unless `path` puts it there."""
    # -S and the standard library's path only: the editable install of this repository is out of sight, and so are
    # the installed packages; the small ones are given back as empty modules, so that nothing is installed.
    packages = place.parent / "packages"
    packages.mkdir(exist_ok=True)
    for name in lib.SMALL:
        (packages / f"{name}.py").touch()
    if torch:
        (packages / "torch.dist-info").mkdir(exist_ok=True)
        (packages / "torch.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
        )
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    python_path = os.pathsep.join(map(str, [packages, *([path] if path else [])]))
    return subprocess.run(
        [python or sys.executable, "-S", "-c", before + cell + FOUND],
        cwd=place, env=inherited | {"PYTHONPATH": python_path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def assert_quietly_found(result, init: Path):
    assert result.stderr == ""
    assert result.stdout == f"found {init}\n"


def sentence(result) -> str:
    """What the reader sees at the end: one line."""
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.count("Error: ") == 1, "one error, not a chain of them"
    return result.stderr.splitlines()[-1].removeprefix("ImportError: ")


@pytest.mark.parametrize(
    ("books", "path", "found"),
    [
        (["installed"], "installed", "installed"),
        (["."], "", "."),
        (["."], "other", "."),
        (["installed", "."], "installed", "."),
        *(([at], "", at) for at in ("content/parallel-by-hand (1)", "content/parallel-by-hand-main")),
        (["content/parallel-by-hand/parallel-by-hand"], "", "content/parallel-by-hand/parallel-by-hand"),
    ],
)
def test_the_books_library_is_found_installed_around_or_unpacked(place, books, path, found):
    """Another installed `lib` and a folder of that name do not stand in for it; a copy around the notebook is first."""
    (place / "lib").mkdir()
    (place.parent / "other" / "lib").mkdir(parents=True)
    (place.parent / "other" / "lib" / "__init__.py").touch()
    inits = {folder: book(place.parent / folder) for folder in books}
    assert_quietly_found(run(place, path=place.parent / path if path else None), inits[found])


NEEDS_TORCH = (
    "is installed, and the book needs 2.8 or newer: upgrade it, restart the kernel, then run this cell first."
)


@pytest.mark.parametrize(
    ("before", "torch", "said"),
    [
        (
            "import sys, types; sys.modules['lib'] = types.ModuleType('lib')\n",
            "2.8.0",
            "Another package called lib is imported already: restart, then run this cell first.",
        ),
        (
            "import sys; sys.path.insert(0, '../older'); import lib\n",
            "2.8.0",
            "lib was imported from another copy of the book, {folder}/older, and this notebook belongs to {folder}: "
            "restart the kernel, then run this cell first.",
        ),
        (
            "import sys; sys.version_info = (3, 10, 12, 'final', 0)\n",
            "2.8.0",
            "This kernel runs Python 3.10, and the book needs 3.11 or newer: choose another kernel, or make one with a "
            "newer Python.",
        ),
        (
            "",
            None,
            f"torch is not installed in this kernel, {sys.executable}: choose the kernel that has it, or install it "
            "there as pytorch.org says.",
        ),
        ("", "2.7.1+cu118", f"torch 2.7.1+cu118 {NEEDS_TORCH}"),
        ("", "1.13.1", f"torch 1.13.1 {NEEDS_TORCH}"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_named(place, before, torch, said):
    book(place.parent)
    book(place.parent / "older")
    assert sentence(run(place, before=before, torch=torch)) == said.format(folder=place.parent)


@pytest.mark.parametrize("version", ["2.8.0a0+git12ab", "2.10.0"])
def test_a_torch_that_is_new_enough_is_left_alone(place, version):
    init = book(place.parent)
    assert_quietly_found(run(place, torch=version), init)


def zipped(path: Path, init: str = INIT, top: str = "parallel-by-hand/", **more: str) -> Path:
    """A zip of the book with two files of its library, an exercise, and more."""
    names = {"lib/__init__.py": init, "lib/more.py": "MORE = 1\n", "exercises/01.ipynb": "{}", **more}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in names.items():
            archive.writestr(f"{top}{name}", text)
    return path


@pytest.mark.parametrize(
    ("name", "top"),
    [
        ("parallel-by-hand.zip", "parallel-by-hand/"),
        ("parallel-by-hand (1).zip", "parallel-by-hand/"),
        ("parallel-by-hand-2.zip", "parallel-by-hand/"),
        ("parallel-by-hand copy.zip", "x/parallel-by-hand/"),
        ("parallel-by-hand-main.zip", "parallel-by-hand-main/"),
        ("parallel-by-hand.zip", ""),
    ],
)
def test_a_zip_is_unpacked_also_where_it_was_renamed_or_packed_again(place, name, top):
    zipped(place / name, top=top)
    (place / "parallel-by-hand-pages.zip").write_bytes(b"the site, of which half is here")
    for _ in range(2):  # the second run finds what the first unpacked
        assert_quietly_found(run(place), place / "parallel-by-hand" / "lib" / "__init__.py")
    assert (place / "parallel-by-hand" / "exercises" / "01.ipynb").is_file()


def test_without_a_zip_of_the_book_or_an_address_it_says_what_to_do(place):
    assert "put it beside this notebook" in sentence(run(place))
    assert list(place.iterdir()) == []
    with zipfile.ZipFile(place / "parallel-by-hand.zip", "w") as archive:
        archive.writestr("parallel-by-hand/index.html", "")
    said = sentence(run(place))
    assert said.startswith(
        "parallel-by-hand.zip is the wrong zip, without the library: download parallel-by-hand.zip"
    )


@pytest.mark.parametrize("name", ["parallel-by-hand-pages.zip", "parallel-by-hand-pages (1).zip"])
def test_the_zip_of_the_pages_is_named_as_the_wrong_one(place, name):
    (place / name).write_bytes(b"the site, of which half is here")
    said = sentence(run(place))
    assert said.startswith(f"{name} is the wrong zip, with the pages: download parallel-by-hand.zip")
    assert "put it beside this notebook" in said and [path.name for path in place.iterdir()] == [name]


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["parallel-by-hand.zip", "parallel-by-hand (1).zip"])
def test_a_zip_that_is_still_uploading_is_named(place, name, keep):
    whole = zipped(place / name).read_bytes()
    (place / name).write_bytes(whole[: int(keep * len(whole))])
    said = sentence(run(place))
    assert said.startswith(f"{name} ({int(keep * len(whole)):,} bytes) cannot be unpacked (")
    assert said.endswith("wait until it is uploaded, or upload it again, then run this cell again.")
    (place / name).write_bytes(whole)
    assert_quietly_found(run(place), place / "parallel-by-hand" / "lib" / "__init__.py")


def test_a_zip_with_a_broken_file_is_named_and_nothing_of_it_counts(place):
    whole = bytearray(zipped(place / "parallel-by-hand.zip").read_bytes())
    at = whole.index(b"parallel-by-hand/lib/more.py") + len("parallel-by-hand/lib/more.py")
    whole[at : at + 4] = b"\xff" * 4
    (place / "parallel-by-hand.zip").write_bytes(whole)
    for _ in range(2):
        assert "cannot be unpacked" in sentence(run(place))


@pytest.mark.parametrize("lost", ["lib/__init__.py", "lib/more.py", "lib", "exercises/01.ipynb", "exercises"])
def test_what_was_unpacked_by_half_is_completed(place, lost):
    zipped(place / "parallel-by-hand.zip")
    run(place)
    folder = place / "parallel-by-hand"
    (shutil.rmtree if (folder / lost).is_dir() else os.unlink)(folder / lost)
    assert_quietly_found(run(place), folder / "lib" / "__init__.py")
    assert {path.name for path in folder.rglob("*.*") if path.is_file()} >= {"__init__.py", "more.py", "01.ipynb"}


def test_a_newer_zip_replaces_the_library_and_none_of_the_readers_files(place):
    """In a kernel that has imported the older one, it asks for a restart."""
    init = book(place / "parallel-by-hand")
    (place / "parallel-by-hand" / "exercises").mkdir()
    (place / "parallel-by-hand" / "exercises" / "01.ipynb").write_text("my answers")
    (place / "parallel-by-hand" / ".progress.json").write_text("mine")
    os.utime(init, (1, 1))
    newer = INIT + "\nprint('newer')\n"
    zipped(place / "parallel-by-hand (1).zip", newer, **{".progress.json": "of the zip"})
    old = zipped(place / "parallel-by-hand.zip", "raise RuntimeError('the older zip')")
    os.utime(old, (2, 2))
    before = f"import sys; sys.path.insert(0, {str(place / 'parallel-by-hand')!r}); import lib\n"
    assert sentence(run(place, before=before)) == (
        "parallel-by-hand (1).zip has a newer library, unpacked now: restart the kernel, then run this cell first."
    )
    assert run(place).stdout == f"newer\nfound {init}\n"
    assert (place / "parallel-by-hand" / "exercises" / "01.ipynb").read_text() == "my answers"
    assert (place / "parallel-by-hand" / ".progress.json").read_text() == "mine"


def test_an_older_zip_replaces_nothing(place):
    zipped(place / "parallel-by-hand.zip")
    run(place)
    init = place / "parallel-by-hand" / "lib" / "__init__.py"
    init.write_text(INIT + "\nprint('edited by the reader')\n")
    assert run(place).stdout.startswith("edited by the reader\n")


def git(folder: Path, command: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *command.split()], cwd=folder, check=True)


def test_a_notebook_of_a_release_fetches_that_release(place):
    source = place.parent / "source"
    init = book(source)
    for command in ("init -q -b main", "add .", "commit -q -m book", "tag v1.0.0"):
        git(source, command)
    init.write_text(INIT + "\nraise RuntimeError('newer')\n")
    git(source, "commit -q -a -m newer")
    cell = CELL.replace(PLACEHOLDER, source.as_uri())
    assert "newer" in run(place, cell).stderr
    shutil.rmtree(place / "parallel-by-hand")
    cell = cell.replace('BRANCH = "main"', 'BRANCH = "v1.0.0"')
    assert_quietly_found(run(place, cell), place / "parallel-by-hand" / "lib" / "__init__.py")


def test_a_repository_that_cannot_be_fetched_is_named(place):
    said = sentence(run(place, CELL.replace(PLACEHOLDER, (place / "nowhere").as_uri())))
    assert said.startswith(f"The book could not be fetched from {(place / 'nowhere').as_uri()}: ")
    assert "does not " in said, "git's own words"


@pytest.mark.parametrize("python", ["python3.8", "python3.9", "python3.10"])
def test_a_kernel_that_is_really_old_reads_the_sentence(place, python):
    """Not a SyntaxError before it."""
    for text in (CELL, INIT):
        ast.parse(text, feature_version=(3, 8))
    if not shutil.which(python) or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"there is no {python} here")
    book(place.parent)
    assert f"This kernel runs Python {python[6:]}, and the book needs" in sentence(run(place, python=python))


def test_small_packages_are_installed_only_where_they_are_missing(place):
    init = book(place.parent)
    watch = (
        "import subprocess, types\n"
        "subprocess.run = lambda command, **_: print(command[1:]) or types.SimpleNamespace(returncode=0)\n"
    )
    hide = (
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'cloudpickle' else find(name)\n"
    )
    assert run(place, before=watch).stdout == f"found {init}\n"
    first, second = run(place, before=watch + hide).stdout.splitlines()
    assert first == "['-m', 'pip', 'install', '-q', '--disable-pip-version-check', 'cloudpickle']"
    assert second == f"found {init}"


def test_a_package_that_cannot_be_installed_is_named(place):
    init = book(place.parent)
    init.write_text(INIT.replace('SMALL = ("', 'SMALL = ("no-such-package", "'))
    said = sentence(run(place, before="import os; os.environ.update(PIP_NO_INDEX='1', PIP_FIND_LINKS='')\n"))
    assert said.startswith("no-such-package could not be installed: ERROR: Could not find a version")


def test_it_names_the_page_and_never_torch_as_something_to_install(place):
    book(place.parent)
    result = run(place, CELL.replace("tools/setup_cell.py", "chapters/x.ipynb") + "\nprint(os.environ['BOOK_PAGE'])")
    assert "chapters/x.ipynb" in result.stdout
    assert "torch" not in "".join(line.partition("#")[0] for line in CELL.splitlines())
    assert "torch" not in lib.SMALL


INTERRUPTED = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
sys.path.insert(0, sys.argv[1])
ready = "import lib, sys; lib.ready(sys.argv[1])"
for cell in [ready, ready, "print('fine')", "import torch", "import torch", "1 + 1"]:
    print("---")
    shell.run_cell(cell)
"""


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_after_an_interrupted_import_each_cell_says_that_only_a_restart_helps(place, package):
    pytest.importorskip("IPython")
    root = book(place).parents[1]
    (place / package).mkdir()
    (place / package / "half.py").touch()
    (place / package / "__init__.py").write_text(f"import {package}.half\nraise KeyboardInterrupt\n")
    if package == "numpy":
        (place / "torch.py").write_text("import numpy")
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, root], cwd=place, capture_output=True, text=True)
    cells = done.stdout.split("---\n")[1:]
    said = f"The import of {package} was interrupted: restart the kernel, then run the first cell again.\n"
    assert [cell.count(said) for cell in cells] == [0, 0, 0, 1, 1, 1], done.stdout + done.stderr
