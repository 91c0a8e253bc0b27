"""Tables of all exercises: the programs that each check was tried on, what a reader has done, what a task asks."""

import json
from html import escape
from itertools import groupby
from pathlib import Path

from live_page import ROOT, add_live_page, table

USED = ["course/check/*.py", "course/exercises/**/*.py"]
TRIED = "book/kill_table.json"  # written by tools/kills.py


def chapters():
    """(number of a chapter, its exercises) for each."""
    from course.check.catalogue import EXERCISES  # torch is imported only where these tables are made

    return [(k, [*found]) for k, found in groupby(EXERCISES.values(), key=lambda e: e.chapter)]


def kills() -> str:
    rows, tried = [], json.loads((ROOT / TRIED).read_text(encoding="utf-8"))
    for chapter, exercises in chapters():
        rows.append(f'<tr><th scope="rowgroup" colspan="5">Chapter {int(chapter)}</th></tr>')
        for e in exercises:
            right = [program for one in e.rows.values() for program in one.right]
            wrong = [mistake for one in e.rows.values() for mistake in one.mistakes]
            hints = "".join(f"<li>{escape(hint)}</li>" for hint in dict.fromkeys(m.hint for m in wrong))
            passed, named, fail_s = (tried[e.id][name] for name in ("right", "wrong", "fail_s"))
            rows.append(
                f"<tr><td>{e.id}</td><td><details><summary><code>{escape(e.title)}</code></summary>"
                f"<ul>{hints}</ul></details></td><td>{passed} of {len(right)}</td>"
                f"<td>{named} of {len(wrong)}</td><td>{fail_s:.1f} s</td></tr>"
            )
    passed, named, slipped = (sum(row[name] for row in tried.values()) for name in ("right", "wrong", "slips"))
    machines = "; ".join(sorted({row["machine"] for row in tried.values()}))
    said = (
        f"<p>{len(tried)} exercises: {passed} right programs passed, and {named} wrong programs got their own hint. "
        f"None of {slipped} slips in right results passed. Measured on {escape(machines)}.</p>"
    )
    return said + table("kills", ("id", "exercise", "right: passed", "wrong: named", "seconds of a FAIL"), rows)


def progress() -> str:
    rows = []
    for chapter, exercises in chapters():
        name = next(ROOT.glob(f"exercises/{chapter}_*.ipynb")).stem
        link = f'<a href="../exercises/{name}.html">Chapter {int(chapter)}</a>'
        rows.append(f'<tr><th scope="rowgroup" colspan="3">{link}</th></tr>')
        for e in exercises:
            box = f'<input type="checkbox" id="done-{e.id}" data-points="{e.points:g}">'
            label = f'<label for="done-{e.id}">{e.id} <code>{escape(e.title)}</code></label>'
            rows.append(f"<tr><td>{box}</td><td>{label}</td><td>{e.points:g}</td></tr>")
    return (
        '<div id="progress"><p role="status"></p>'
        '<p><label for="progress-file">Load a record:</label> <input type="file" id="progress-file" accept=".json"></p>'
        '<p><a href="#progress" download="parallel-by-hand.progress.json">Save the record</a></p>'
        + table("done-list", ("done", "exercise", "points"), rows)
        + "</div>"
    )


def effort() -> str:
    """What each task asks, and the homeworks that have it."""
    from course.release.effort import EXPLAINED, efforts  # it reads all tasks

    homeworks = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("course/assignments/*.json"))
    ]
    rows = []
    for chapter, known in groupby(efforts().items(), key=lambda item: item[0].partition(".")[0]):
        asked = list(known)
        total = sum(effort.minutes for _, effort in asked)
        rows.append(f'<tr><th scope="rowgroup" colspan="5">Chapter {int(chapter)}: {total} minutes</th></tr>')
        for id, effort in asked:
            given = ", ".join(homework["id"] for homework in homeworks if id in homework["exercises"])
            cells = id, f"{effort.minutes}", effort.needs, effort.after, given
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "exercise", "minutes", "needs", "the mistake that it is after", "homework"
    return f"<p>{EXPLAINED}</p>{table('efforts', head, rows)}"


def setup(app):
    add_live_page(app, "effort-table", effort, ["exercises/*.ipynb", "course/assignments/*.json"], [])
    add_live_page(app, "kill-table", kills, [*USED, TRIED], [])
    script = Path(__file__).parent / "static" / "progress.js"
    return add_live_page(app, "progress-table", progress, [*USED, str(script.relative_to(ROOT))], [script.name])
