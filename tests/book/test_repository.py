"""What the repository says about itself is true: map, table of contents, twins, address, pins, palette."""

import ast
import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(p for folder in ("chapters", "exercises", "solutions") for p in ROOT.glob(f"{folder}/*.ipynb"))
CHAPTERS = sorted(ROOT.glob("chapters/*.ipynb"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def tool(module: str):
    """A script of tools/, as a module; the scripts find each other as they do when they are run."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = spec_from_file_location(f"tools_{module}", ROOT / "tools" / f"{module}.py")
        loaded = module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def repository():
    return tool("set_repository")


def texts() -> list[str]:
    """The files git has or would add; all but vendored ones and pictures."""
    names = tool("make_colab_zip").files()
    return [one for one in names if "vendor/" not in one and not one.endswith((".png", ".woff", ".gz"))]


# ---- the map and the table of contents ------------------------------------------------------------------------------


def test_everything_the_readme_links_to_exists():
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", read("README.md")) if "://" not in target]
    links += re.findall(r'<img src="([^"]+)"', read("README.md"))
    assert [target for target in links if not (ROOT / target).exists()] == []


def test_every_chapter_is_on_the_map_and_names_its_library_files():
    rows = [row for row in read("README.md").splitlines() if row.startswith("| [")]
    on_the_map = {re.search(r"\((chapters/[^)]+)\)", row).group(1) for row in rows}
    assert on_the_map == {name(path) for path in CHAPTERS if not is_deeper(path)}
    assert all(re.search(r"\]\((?:lib|course)/[^)]+\.py\)", row) for row in rows)


def is_deeper(path: Path) -> bool:
    """Whether a page goes deeper than a chapter, behind which it stands: `06b_tensor_deeper`."""
    return path.stem[2] == "b"


def toc_chapters() -> dict[str, list[str]]:
    """The pages of the contents, and those that stand behind each of them, in order."""
    parts = yaml.safe_load(read("_toc.yml"))["parts"]
    listed = [chapter for part in parts for chapter in part["chapters"]]
    return {chapter["file"]: [section["file"] for section in chapter.get("sections", [])] for chapter in listed}


def toc_entries() -> list[str]:
    root = yaml.safe_load(read("_toc.yml"))["root"]
    return [root, *(page for chapter, behind in toc_chapters().items() for page in (chapter, *behind))]


def test_table_of_contents_names_what_exists_and_misses_no_notebook():
    entries = toc_entries()
    assert len(entries) == len(set(entries))
    assert [
        e for e in entries if not any((ROOT / f"{e}{suffix}").is_file() for suffix in (".ipynb", ".md", ".rst"))
    ] == []
    assert [name(path) for path in NOTEBOOKS if name(path).removesuffix(".ipynb") not in entries] == []


def test_exercises_stand_with_their_chapter_and_their_solutions_behind_them():
    behind = {chapter: pages for chapter, pages in toc_chapters().items() if chapter.startswith("chapters/")}
    for chapter, pages in behind.items():
        stem = chapter.removeprefix("chapters/")
        has_exercises = (ROOT / f"exercises/{stem}.ipynb").is_file()
        deeper = [f"chapters/{path.stem}" for path in CHAPTERS if is_deeper(path) and f"{path.stem[:2]}_" == stem[:3]]
        assert pages == ([f"exercises/{stem}", f"solutions/{stem}"] if has_exercises else []) + deeper
    assert list(behind) == sorted(behind), "in the order of their numbers, and without one behind"


def test_every_paper_that_a_chapter_links_to_is_in_the_bibliography():
    bibliography = read("book/references.bib")
    linked = {
        key
        for path in ROOT.glob("chapters/*.md")
        for key in re.findall(r"\(https://(?:arxiv\.org/abs|doi\.org)/([^)\s]+)\)", path.read_text(encoding="utf-8"))
    }
    assert sorted(key for key in linked if key not in bibliography) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_code_fits_the_page(path):
    """As written, and the library's source where a cell shows it; but for the setup cell, which is folded."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    lines, names = [], {}
    for cell in cells:
        lines += cell.source.splitlines() if "remove-cell" not in cell.metadata.get("tags", []) else []
        for node in ast.parse(cell.source).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith(("lib", "course", "book")):
                exec(ast.unparse(node), names)
        source = cell.source.partition("\n")[2] if cell.source.startswith("#@title") else cell.source
        if source.startswith("show("):
            shown = repr(eval(source, names))
            compile(shown, "shown", "exec")
            lines += shown.splitlines()
    assert [line for line in lines if len(line) > 80] == []


# ---- notebooks ------------------------------------------------------------------------------------------------------


def test_twins_agree():
    command = [sys.executable, "tools/notebooks.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_normal_form_is_stable_and_only_solutions_keep_outputs_until_their_code_changes(tmp_path, monkeypatch):
    notebooks = tool("notebooks")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "solutions").mkdir()
    source = tmp_path / "solutions" / "01_x.md"
    source.write_text('<p class="kick">Solutions</p>\n\n# X\n\n```{code-cell}\n1 + 1\n```\n')

    def write():
        for path, text in notebooks.twins(source).items():
            path.write_text(text)
        return json.loads(source.with_suffix(".ipynb").read_text())

    notebook = write()
    ids = [cell["id"] for cell in notebook["cells"]]
    assert ids[1] == "setup" and [cell["id"] for cell in write()["cells"]] == ids

    output = {"output_type": "stream", "name": "stdout", "text": ["2\n"]}
    notebook["cells"][2].update(execution_count=1, outputs=[output])
    source.with_suffix(".ipynb").write_text(json.dumps(notebook))
    source.write_text(source.read_text().replace("# X", "# Y"))
    assert write()["cells"][2]["outputs"] != []
    source.write_text(source.read_text().replace("1 + 1", "1 + 2"))
    notebook = write()
    assert notebook["cells"][2]["outputs"] == []
    assert [a == b["id"] for a, b in zip(ids, notebook["cells"], strict=True)] == [False, True, False]

    source = (tmp_path / "solutions").rename(tmp_path / "chapters") / "01_x.md"
    notebook["cells"][2].update(execution_count=1, outputs=[output])
    source.with_suffix(".ipynb").write_text(json.dumps(notebook))
    assert write()["cells"][2]["outputs"] == [], "a chapter keeps none"


# ---- the public address ---------------------------------------------------------------------------------------------


def test_address_agrees_wherever_it_is_repeated(repository):
    address = repository.address()
    config = yaml.safe_load(read("_config.yml"))
    assert config["html"]["baseurl"] == config["sphinx"]["config"]["ogp_site_url"] == f"{repository.pages(address)}/"
    assert yaml.safe_load(read("CITATION.cff"))["repository-code"] == address
    assert f'Repository = "{address}"' in read("pyproject.toml")
    assert f'REPOSITORY = "{address}"\nBRANCH = "{repository.branch()}"\n' in read("tools/setup_cell.py")
    assert f"<{address}>" in read("README.md")
    if address != repository.PLACEHOLDER:
        left = {file for file in texts() if repository.PLACEHOLDER in read(file)}
        assert left <= {"tools/set_repository.py", "tests/book/test_setup_cell.py"}


def test_address_can_be_set_and_set_back(repository, tmp_path, monkeypatch):
    for file in repository.REPEATED_IN:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(read(file))
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    before = repository.address()
    repository.set_address("https://github.com/Some-Org/some.repo", "v1.2.3")
    assert repository.colab(repository.address()).endswith("/Some-Org/some.repo/blob/v1.2.3")
    for file, line in (
        ("_config.yml", "  branch: v1.2.3"),
        ("tools/setup_cell.py", 'BRANCH = "v1.2.3"'),
        ("pyproject.toml", 'version = "1.2.3"'),
        ("CITATION.cff", "version: 1.2.3"),
    ):
        assert line in (tmp_path / file).read_text().splitlines()
    config = (tmp_path / "_config.yml").read_text()
    assert "url: https://github.com/Some-Org/some.repo\n" in config
    assert "baseurl: https://some-org.github.io/some.repo/\n" in config
    assert before not in config + (tmp_path / "tools" / "setup_cell.py").read_text()
    repository.set_address(before, "v" + yaml.safe_load(read("CITATION.cff"))["version"])
    repository.set_address(before, yaml.safe_load(read("_config.yml"))["repository"]["branch"])
    assert all((tmp_path / file).read_text() == read(file) for file in repository.REPEATED_IN)


@pytest.mark.parametrize("wrong", ["", "github.com/a/b", "https://github.com/a", "https://github.com/a/b/c", "a b"])
def test_a_wrong_address_is_refused_in_one_sentence(wrong):
    command = [sys.executable, "tools/set_repository.py", wrong]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1


# ---- what is installed ----------------------------------------------------------------------------------------------


def requirements(path: str) -> dict[str, str]:
    """Package name, normalised, to its version part."""
    lines = (line.split("#")[0].strip() for line in read(path).splitlines())
    found = (re.match(r"([\w.-]+?)\s*([<>=!~].*)?$", line) for line in lines if line)
    return {re.sub(r"[._-]+", "-", m.group(1)).lower(): m.group(2) or "" for m in found}


def test_requirements_name_the_six_packages_as_ranges():
    wanted = requirements("requirements.txt")
    assert {"jupyter-book", "torch", "numpy", "matplotlib", "ipywidgets", "nbval"} <= wanted.keys()
    assert [package for package, version in wanted.items() if "==" in version] == []
    assert "<2" in wanted["jupyter-book"] and wanted["torch"] == ">=2.8"


def test_what_is_imported_is_required():
    folders = ("lib", "course", "tools", "tests", "book", "benchmarks")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    ours = {path.stem for path in files} | set(folders)
    modules = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) - ours
    wanted, packages = requirements("requirements.txt"), packages_distributions()
    found = {
        module: {re.sub(r"[._-]+", "-", p).lower() for p in packages.get(module, [module])} for module in modules
    }
    assert {"torch", "pytest", "bs4"} <= modules
    assert [module for module in sorted(modules) if not found[module] & wanted.keys()] == []


def test_constraints_pin_all_that_is_required_and_no_local_build():
    pins = requirements("constraints.txt")
    assert requirements("requirements.txt").keys() <= pins.keys()
    assert [f"{p}{v}" for p, v in pins.items() if not re.fullmatch(r"==[\w.]+", v)] == []


def test_workflows_try_what_is_promised():
    """The oldest Python and the oldest torch among it; and what they run is there."""
    workflows = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob(".github/workflows/*.yml")]
    jobs = {name: job for workflow in workflows for name, job in workflow["jobs"].items()}
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    asked = {"book", "site", "lint", "test", "test-course", "test-book", "thorough", "busy", "newest"}
    assert {f"make {target}" for target in asked} | {".ci/long"} <= {*runs}
    assert [run for run in runs if "sphinx-build" in run], "the pages without Jupyter Book"
    matrix = jobs["versions"]["strategy"]["matrix"]["include"]
    oldest, newest = sorted((e["torch"] for e in matrix if "torch" in e), key=lambda v: [*map(int, v.split("."))])
    pinned = requirements("constraints.txt")["torch"].removeprefix("==")
    assert [*map(int, newest.split("."))] > [*map(int, pinned.split("."))], "a torch that is newer than the pin"
    assert oldest == requirements("requirements.txt")["torch"].removeprefix(">=") + ".0"
    oldest_python = re.search(r'requires-python = ">=([\d.]+)"', read("pyproject.toml"))[1]
    assert sorted({entry["python"] for entry in matrix}) == [oldest_python, "3.12", "3.13"]


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    files = ("README.md", "CONTRIBUTING.md", ".ci/run", ".ci/long", *map(name, ROOT.glob(".github/workflows/*.yml")))
    named = {target for file in files for target in re.findall(r"(?:`|^|: )make ([a-z-]+)", read(file), re.MULTILINE)}
    assert {"test", "screenshots", "busy"} <= named <= targets


def test_help_has_each_target_in_a_group_and_six_that_suffice():
    makefile = read("Makefile")
    titles = dict(
        re.findall(r"^(\w+) ([A-Z].*)$", re.search(r"define HELP\n(.*?)endef", makefile, re.DOTALL)[1], re.M)
    )
    groups = re.findall(r"^[a-z-]+:.*## (\w+): ", makefile, re.MULTILINE)
    assert len(groups) == len(re.findall(r"^[a-z-]+:.*## ", makefile, re.MULTILINE)) - 1, "all but help"
    assert {*groups} == {*titles} and groups.count("six") == 6
    said = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert said.startswith(f"{titles['six']}\n") and said.count("\n  ") == len(groups)


def test_the_kernel_is_the_one_of_this_environment(monkeypatch):
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # as the Makefile does
    from jupyter_client.kernelspec import get_kernel_spec

    assert Path(get_kernel_spec("python3").resource_dir).is_relative_to(sys.prefix)


def test_a_kernel_starts_without_a_word(monkeypatch):
    """A build of the book starts one for each chapter; `make setup` says what it reads first."""
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    code = (
        "from jupyter_client.manager import start_new_kernel as s; k, c = s(); c.stop_channels(); k.shutdown_kernel()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# ---- the whole ------------------------------------------------------------------------------------------------------


def test_no_file_names_a_machine_or_a_mirror():
    # Spelled so that this file does not name them itself.
    paths = re.compile(r"/(?:work|root|home/\w+|opt/(?:pypi|wheels))/|find-links|extra-index")
    found = {file: paths.findall(read(file)) for file in texts() if file != "tests/book/test_repository.py"}
    assert {file: names for file, names in found.items() if names} == {}


def test_zip_for_colab_holds_what_a_notebook_needs(tmp_path):
    with zipfile.ZipFile(tool("make_colab_zip").write(tmp_path / "book.zip")) as archive:
        names = {entry.removeprefix("parallel-by-hand/") for entry in archive.namelist()}
    assert {"lib/__init__.py", *map(name, NOTEBOOKS)} <= names
    assert not [entry for entry in names if "__pycache__" in entry or entry.endswith(".pyc")]
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        for module, things in re.findall(r"^\s*from ((?:lib|course|book)[\w.]*) import (.*)$", code, re.MULTILINE):
            near = [
                module.replace(".", "/"),
                *(f"{module}.{thing}".replace(".", "/") for thing in things.split(", ")),
            ]
            files = {f"{one}{end}" for one in near for end in (".py", "/__init__.py")}
            needed = {file for file in files if (ROOT / file).is_file()}
            assert needed and needed <= names, f"{name(notebook)} imports {module}"


def test_a_copy_without_git_is_zipped_too(tmp_path, monkeypatch):
    zipped = tool("make_colab_zip")
    wanted = ["chapters/01.ipynb", "lib/__init__.py", "lib/comm.py"]
    for file in (*wanted, "lib/__pycache__/a.pyc", "lib/.cache", "x.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(zipped, "ROOT", tmp_path)
    assert zipped.files(*zipped.NEEDED) == wanted


def test_book_is_importable_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(Path(find_spec(name).origin).is_relative_to(ROOT) for name in ("lib", "course", "book"))
