"""Chapters are executed three at a time, and no cell runs beside one that must be alone."""

import subprocess
import threading
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from jupyter_cache import get_cache

ROOT = Path(__file__).resolve().parents[2]
v4 = nbformat.v4


@pytest.fixture
def tool(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import execute_chapters

    monkeypatch.setattr(execute_chapters, "ROOT", tmp_path)
    return execute_chapters


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True), (True, True)])
def test_who_runs_beside_whom(tool, kinds):
    turns, at_work, most = tool.Turns(), [], []

    def notebook(name, alone):
        for _ in range(5):
            turns.begin(name, alone)
            at_work.append(name)
            time.sleep(0.01)
            most.append(len(at_work))
            at_work.remove(name)
            turns.end(name, alone)

    threads = [threading.Thread(target=notebook, args=case) for case in enumerate(kinds)]
    [thread.start() for thread in threads]
    [thread.join(10) for thread in threads]
    assert len(most) == 10 and max(most) == (1 if any(kinds) else 2)


def written(folder: Path, name: str, *cells) -> Path:
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source, metadata={"tags": tags}) for source, tags in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / name)
    return folder / name


def test_outputs_are_where_sphinx_looks_and_a_cell_alone_has_no_neighbour(tool, tmp_path):
    now, rest = (
        "import time\ntime.sleep(0.05)\nprint(time.time())",
        "import time\ntime.sleep(0.3)\nprint(time.time())",
    )
    a = written(tmp_path, "a.ipynb", (rest, []), (rest, ["alone"]), (rest, []))
    b = written(tmp_path, "b.ipynb", *[(now, [])] * 30)
    assert tool.execute_all([a, b], tmp_path / "cache") == 0
    cache = get_cache(tmp_path / "cache")
    times = []
    for path in (a, b):
        _, executed = cache.merge_match_into_notebook(nbformat.read(path, as_version=4))
        times.append([float(cell.outputs[0].text) for cell in executed.cells])
    ended = times[0][1]
    assert not [t for t in times[1] if ended - 0.25 < t < ended]


def test_a_cell_that_fails_ends_the_build_and_is_named(tool, tmp_path, capsys):
    bad = written(tmp_path, "bad.ipynb", ("print('so far')", ["alone"]), ("1 / 0", ["alone"]))
    good = written(tmp_path, "good.ipynb", ("print('well')", []))
    assert tool.execute_all([bad, good], tmp_path / "cache") == 1
    said = capsys.readouterr().err
    assert said.startswith("bad.ipynb:") and "ZeroDivisionError" in said


def test_a_cell_that_never_ends_does_not_stop_the_neighbour(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "TIMEOUT_S", 1)
    endless = written(tmp_path, "a.ipynb", ("while True: pass", ["alone"]))
    other = written(tmp_path, "b.ipynb", *[("print(1)", [])] * 3)
    assert tool.execute_all([endless, other], tmp_path / "cache") == 1


def test_a_chapter_is_built_alone_with_what_belongs_to_it(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import build_chapters

    chapters = [build_chapters.find(name) for name in ("03", "workshop")]
    assert [path.stem for path in chapters] == ["03_data_parallelism", "workshop"]
    toc = yaml.safe_load(build_chapters.contents(chapters))
    assert toc["root"] == "chapters/03_data_parallelism"
    rest = ["exercises/03_data_parallelism", "solutions/03_data_parallelism", "chapters/workshop"]
    assert [page["file"] for page in toc["chapters"]] == rest
    assert "chapters" not in yaml.safe_load(build_chapters.contents(chapters[1:]))
    for unknown in ("3", "99", "*", ""):
        with pytest.raises(SystemExit, match="There is no chapter .*there are 00, 01, .*: make book CHAPTER=03"):
            build_chapters.find(unknown)


def test_make_book_takes_chapters():
    # A make that was given VENV, or is itself run by make, says more before that line.
    command = ["make", "-n", "--no-print-directory", "book", "CHAPTER=02 07"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.rstrip().endswith("tools/build_chapters.py 02 07")
