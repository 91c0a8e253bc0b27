"""The first cell of every notebook, in each place where a reader may run it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CELL = (ROOT / "tools" / "setup_cell.py").read_text(encoding="utf-8")
PLACEHOLDER = "https://example.invalid/parallel-by-hand"
# Whatever the address is today: these tests must never clone from it.
CELL = re.sub(r'REPOSITORY = ".*"', f'REPOSITORY = "{PLACEHOLDER}"', CELL)
FOUND = "\nimport lib; print('found', lib.__file__)"


@pytest.fixture
def place(tmp_path):
    """An empty folder that nothing of this repository is visible from."""
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def book(folder: Path) -> Path:
    """A small stand-in for the book's library, in `folder`."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "__init__.py").write_text('BOOK = "parallel-by-hand"\n')
    return folder / "lib" / "__init__.py"


def run(place: Path, cell: str = CELL, before: str = "", path: Path | None = None) -> subprocess.CompletedProcess:
    """The cell in a Python of its own, without the book in its environment unless `path` puts it there."""
    # -S and the standard library's path only: the editable install of this repository is out of sight, and so are
    # the installed packages; cloudpickle is given back as an empty module, so that nothing is installed.
    packages = place.parent / "packages"
    packages.mkdir(exist_ok=True)
    (packages / "cloudpickle.py").touch()
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    python_path = os.pathsep.join(map(str, [packages, *([path] if path else [])]))
    return subprocess.run(
        [sys.executable, "-S", "-c", before + cell + FOUND],
        cwd=place, env=inherited | {"PYTHONPATH": python_path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def assert_quietly_found(result, init: Path):
    assert result.stderr == ""
    assert result.stdout == f"found {init}\n"


def test_installed_library_is_found(place):
    init = book(place.parent / "installed")
    assert_quietly_found(run(place, path=init.parents[1]), init)


def test_library_in_a_parent_folder_is_found(place):
    init = book(place.parent)
    assert_quietly_found(run(place), init)


def test_another_installed_lib_does_not_stand_in_for_ours(place):
    other = place.parent / "other"
    (other / "lib").mkdir(parents=True)
    (other / "lib" / "__init__.py").write_text("")
    init = book(place.parent)
    assert_quietly_found(run(place, path=other), init)


def test_a_folder_called_lib_without_a_package_does_not_either(place):
    (place / "lib").mkdir()
    init = book(place.parent)
    assert_quietly_found(run(place), init)


def test_another_lib_that_is_imported_already_is_named(place):
    book(place.parent)
    result = run(place, before="import sys, types; sys.modules['lib'] = types.ModuleType('lib')\n")
    assert result.returncode == 1
    assert "Another package called lib is imported already" in result.stderr.splitlines()[-1]


def test_zip_beside_the_notebook_is_unpacked(place):
    with zipfile.ZipFile(place / "parallel-by-hand.zip", "w") as archive:
        archive.writestr("parallel-by-hand/lib/__init__.py", 'BOOK = "parallel-by-hand"\n')
    init = place / "parallel-by-hand" / "lib" / "__init__.py"
    assert_quietly_found(run(place), init)
    assert_quietly_found(run(place), init)  # and a second run finds what the first unpacked


def test_repository_is_cloned(place):
    source = place.parent / "source"
    book(source)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "book"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    cell = CELL.replace(PLACEHOLDER, source.as_uri())
    assert_quietly_found(run(place, cell), place / "parallel-by-hand" / "lib" / "__init__.py")


def test_without_an_address_it_says_what_to_do(place):
    result = run(place)
    assert result.returncode == 1
    assert "upload parallel-by-hand.zip" in result.stderr.splitlines()[-1]
    assert list(place.iterdir()) == []


def test_cloudpickle_is_installed_only_where_it_is_missing(place):
    init = book(place.parent)
    watch = "import subprocess; subprocess.run = lambda command, **_: print(command[1:])\n"
    hide = (
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'cloudpickle' else find(name)\n"
    )
    assert run(place, before=watch).stdout == f"found {init}\n"
    assert "'-m', 'pip', 'install', '-q', 'cloudpickle'" in run(place, before=watch + hide).stdout


def test_it_names_the_page_and_never_torch_as_something_to_install(place):
    book(place.parent)
    result = run(place, CELL.replace("tools/setup_cell.py", "chapters/x.ipynb") + "\nprint(os.environ['BOOK_PAGE'])")
    assert "chapters/x.ipynb" in result.stdout
    assert "torch" not in "".join(line for line in CELL.splitlines() if not line.startswith("#"))
