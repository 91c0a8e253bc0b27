"""Chapters as a reader of Colab runs them: the notebook alone, in a Python that has never heard of the book.

That Python has torch, numpy, matplotlib, ipywidgets and ipykernel, linked from this environment, and nothing else: no
`lib`, no cloudpickle. The setup cell gets the book, from a repository or from the uploaded zip; what it installs comes
from wheels that lie here. So no network is needed, and what it would do to torch can be seen.
"""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import nbformat
import pytest

from tests.book.test_repository import tool

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted(ROOT.glob("chapters/*.ipynb"))
GIVEN = ["torch", "numpy", "matplotlib", "ipywidgets", "ipykernel", "pip"]
INSTALLED = ["cloudpickle", "tqdm"]  # by the setup cell
SETUP_S = 60
WHOLE = "00_start"  # the chapter that is run from its first cell to its last
ADDRESS = "https://github.com/Some-Org/some.repo"


# ---- a Python with five packages -------------------------------------------------------------------------------------


def closure(names: list[str]) -> list[metadata.Distribution]:
    """The distributions of these names, and all that they require here."""
    from packaging.requirements import Requirement

    found, todo = {}, list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # torch requires CUDA's packages; a build for the CPU does without
            continue
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return list(found.values())


def roots(distribution: metadata.Distribution) -> set[Path]:
    """What of a distribution lies in site-packages itself: folders, modules and what is known about it."""
    site = Path(distribution.locate_file(""))
    names = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
    return {site / name for name in names}


def wheel(name: str, folder: Path) -> None:
    """An installed distribution of pure Python, put back into the wheel that it came from."""
    found = metadata.distribution(name)
    files = [file for file in found.files if file.parts[0] != ".." and "__pycache__" not in file.parts]
    unwanted = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
    kept = [file for file in files if not (file.parent.name.endswith(".dist-info") and file.name in unwanted)]
    info = next(file.parent for file in files if file.name == "METADATA")
    with zipfile.ZipFile(folder / f"{name}-{found.version}-py3-none-any.whl", "w") as archive:
        for file in kept:
            archive.write(found.locate_file(file), file.as_posix())
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*kept, info / "RECORD"]))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for name in INSTALLED:
        wheel(name, folder)
    return folder


@pytest.fixture
def python(tmp_path):
    """A Python of its own, with links to the given packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    for distribution in closure(GIVEN):
        for path in roots(distribution):
            if path.exists() and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return tmp_path / "venv" / "bin" / "python"


def clean(python: Path, **more: str) -> dict[str, str]:
    """An environment without this one's traces."""
    unwanted = ("PYTHON", "PIP_", "JUPYTER", "BOOK_", "CHECK_", "VIRTUAL_ENV", "PYTEST", "MPLBACKEND")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    home = python.parents[1]
    return kept | {"HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "PYTHONNOUSERSITE": "1"} | more


def packages(python: Path) -> dict[str, str]:
    code = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    command = [python, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=python.parent, env=clean(python), check=True)
    return dict(entry.split("==") for entry in done.stdout.split())


# ---- the book, as it comes to the reader -----------------------------------------------------------------------------


def copy(folder: Path, set_address: str) -> Path:
    """This working tree in another folder, with an address set there as `make repository` does it."""
    for name in tool("make_colab_zip").files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for arguments in (["-c", set_address], ["notebooks.py"], ["make_exercises.py"]):
        done = subprocess.run([sys.executable, *arguments], cwd=folder / "tools", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """The repository as it will be published, but for its address, which is a folder's."""
    folder = tmp_path_factory.mktemp("origin") / "parallel-by-hand"
    copy(folder, f"import set_repository; set_repository.set_address({folder.as_uri()!r})")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "book"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The repository after `make repository URL=https://github.com/Some-Org/some.repo`."""
    set_address = "import runpy, sys; sys.argv[1:] = [" + repr(ADDRESS) + "]; "
    set_address += "runpy.run_path('set_repository.py', run_name='__main__')"
    return copy(tmp_path_factory.mktemp("published"), set_address)


RUN = """
import json, sys
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
notebook, place, python, variables = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
content = nbformat.read(notebook, as_version=4)
content.cells.append(nbformat.v4.new_code_cell("import lib\\nprint(lib.__file__)"))
manager = AsyncKernelManager(kernel_name="python3")
manager.kernel_spec.argv[0] = python
client = NotebookClient(content, km=manager, timeout=120, resources={"metadata": {"path": place}})
try:
    client.execute(env=variables)
finally:
    run_sync(manager.shutdown_kernel)(now=True)  # a kernel that is given to it, the client leaves alone
nbformat.write(content, notebook)
"""


def run_alone(notebook: Path, place: Path, python: Path, **environment: str):
    """The notebook, alone in a folder, from its first cell to its last, in a kernel of that Python.

    Its client is a process of its own: the sockets that it leaves would disturb the tests that count them.
    """
    variables = clean(python, TMPDIR=str(place.parent), MPLCONFIGDIR=str(place.parent / "mpl"), **environment)
    command = [sys.executable, "-c", RUN, str(notebook), str(place), str(python), json.dumps(variables)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return nbformat.read(notebook, as_version=4)


def seconds(cell) -> float:
    from datetime import datetime

    times = cell.metadata.execution
    began, ended = times["iopub.execute_input"], times["shell.execute_reply"]
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


# Each chapter's imports in a fork of its own, where no other chapter has imported anything of the book.
IMPORT = """
import json, os, sys, traceback
import torch, matplotlib.pyplot, ipywidgets
for name, lines in json.load(sys.stdin).items():
    if not (child := os.fork()):
        try:
            exec(lines, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(name, os.waitpid(child, 0)[1])
"""


def imports(notebook: Path) -> str:
    """All that any cell of a notebook imports, but for the setup cell: what such a Python could lack."""
    code = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    nodes = [node for cell in code[1:] for node in ast.walk(ast.parse(cell.source))]
    lines = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert any(line.startswith("from lib import") for line in lines), "a chapter that uses nothing of the book?"
    return "\n".join(lines)


@pytest.mark.thorough("pip, and a chapter in a Python of its own")
@pytest.mark.slow("pip and a chapter, in a Python of its own")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["git", "zip"])
def test_a_chapter_runs_alone_and_what_any_chapter_imports_is_there(way, tmp_path, python, origin, wheels):
    """The wheels stand in for the package index. Setup cells differ in nothing but the name of their page."""
    place, chapter = tmp_path / "content", f"{WHOLE}.ipynb"
    place.mkdir()
    source = origin if way == "git" else ROOT
    (place / chapter).write_bytes((source / "chapters" / chapter).read_bytes())
    if way == "zip":
        tool("make_colab_zip").write(place / "parallel-by-hand.zip")
    before = packages(python)

    done = run_alone(place / chapter, place, python, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code if cell.source.strip()), "to its end"
    setup, last = code[0], code[-1]
    library = Path(last.outputs[0].text.strip()).parent
    assert library.is_relative_to(place), "the library that was fetched is the one in use"
    assert setup.outputs == [], "it says nothing"
    assert seconds(setup) < SETUP_S
    print(f"\n{chapter}: set up in {seconds(setup):.1f} s by {way}")
    after = packages(python)
    assert {name: v for name, v in after.items() if before.get(name) != v}.keys() == set(INSTALLED)
    assert before.items() <= after.items(), "torch among them"
    left = {path.name for path in place.parent.iterdir()}
    assert not [name for name in left if name.startswith("parallel-by-hand-")]

    if way == "git":
        return  # it brings all files, and the zip those that are meant to be read
    wanted = json.dumps({path.stem: imports(path) for path in CHAPTERS})
    variables = clean(python, PYTHONPATH=str(library.parent), MPLCONFIGDIR=str(tmp_path / "mpl"))
    command = [python, "-P", "-c", IMPORT]
    tried = subprocess.run(command, input=wanted, capture_output=True, text=True, cwd=place, env=variables)
    assert tried.stdout.split("\n")[:-1] == [f"{path.stem} 0" for path in CHAPTERS], tried.stderr


# ---- where a notebook is opened --------------------------------------------------------------------------------------


def links(notebook: Path) -> list[str]:
    cells = nbformat.read(notebook, as_version=4).cells
    return re.findall(r'<a class="colab" href="([^"]+)">', "".join(cell.source for cell in cells))


@pytest.mark.thorough("all notebooks are written anew")
def test_every_notebook_opens_itself_in_colab_and_then_fetches_that_repository(published):
    found = [path for kind in ("chapters", "exercises", "solutions") for path in published.glob(f"{kind}/*.ipynb")]
    assert len(found) > 2
    for path in found:
        name = path.relative_to(published).as_posix()
        assert links(path) == [f"https://colab.research.google.com/github/Some-Org/some.repo/blob/main/{name}"]
        setup = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code").source
        assert f'REPOSITORY = "{ADDRESS}"\n' in setup and f'["BOOK_PAGE"] = "{name}"\n' in setup


@pytest.mark.thorough("a copy of the book is built")
@pytest.mark.parametrize("has_address", [True, False])
def test_pages_lead_to_colab_and_binder_once_there_is_a_repository(has_address, published, tmp_path):
    """A page of the book, built without running it."""
    book, out = published if has_address else copy(tmp_path / "book", ""), tmp_path / "out"
    (book / "_toc.yml").write_text("format: jb-book\nroot: chapters/00_start\n")
    config = (book / "_config.yml").read_text(encoding="utf-8")
    (book / "_config.yml").write_text(config.replace("execute_notebooks: cache", "execute_notebooks: 'off'"))
    command = [Path(sys.executable).with_name("jupyter-book"), "build", book, "--path-output", out]
    done = subprocess.run(command, cwd=book, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (out / "_build" / "html" / "chapters" / "00_start.html").read_text(encoding="utf-8")
    buttons = re.findall(r'<a href="(https://(?:mybinder|colab)[^"]+)"[^>]*class="[^"]*dropdown-item', page)
    binder = "https://mybinder.org/v2/gh/Some-Org/some.repo/main?urlpath=lab/tree/chapters/00_start.ipynb"
    colab = "https://colab.research.google.com/github/Some-Org/some.repo/blob/main/chapters/00_start.ipynb"
    assert buttons == ([binder, colab] if has_address else [])
    assert ("mybinder" in page) == has_address


def test_binder_installs_what_a_notebook_needs():
    """All of it is here already, at versions that the constraints allow: pip reads the file, and has nothing to do."""
    import lib

    needed = (ROOT / "binder" / "requirements.txt").read_text(encoding="utf-8").split()
    assert {*lib.SMALL, "ipywidgets"} <= set(needed) and "torch" not in needed
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-r", "binder/requirements.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stdout + done.stderr
    assert tuple(map(int, re.findall(r"\d+", (ROOT / "binder" / "runtime.txt").read_text()))) >= lib.OLDEST_PYTHON


def test_binder_installs_the_torch_of_the_constraints_for_the_cpu(tmp_path):
    """The script with a pip that only says what it was asked."""
    script = ROOT / "binder" / "postBuild"
    assert os.access(script, os.X_OK)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([script], cwd=ROOT, env=variables, capture_output=True, text=True)
    pinned = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu {pinned}\n"
