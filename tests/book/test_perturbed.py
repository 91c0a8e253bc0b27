"""The chapters' own claims notice when a counter is off: of what was sent, and of what was held in memory."""

import ast
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

import lib
from lib import claim, memory, run, trace
from lib.lab import claims
from lib.lab.claims import ClaimError
from lib.runtime import calls

ROOT = Path(__file__).resolve().parents[2]
ASKS = ('unit="bytes"', 'unit="B"', '"all-reduces', "units sent")  # in a cell, or a claim, about what was counted
# Claims in bytes that no counter has a part in: of shapes, and of a payload.
ELSEWHERE = ("state over all", "one all-reduce, of norms")
SENT = ("sent", "sends", "after forward", "tp: ", "pp: ", "dp: ")  # in the name of a claim about messages
ALL_SENT = ("02", "03", "06")  # chapters in which every claim in bytes is about messages
MUST_FAIL = {"none": (), "1% more": ("sent", "held"), "one more": ("sent", "calls")}


def perturbed(usage):
    """1% more of each kind of memory."""
    return {kind: round(1.01 * n_bytes) for kind, n_bytes in usage.items()}


def off(world, counter, fn, *args):
    """In a rank: each byte that is sent or held counts as 1.01, or the first call of each kind counts twice."""
    if counter == "1% more":
        true = calls.Record._event, memory.MemoryTracker.live.fget

        def event(record, end_s):
            right = true[0](record, end_s)
            return replace(right, wire_bytes=1.01 * right.wire_bytes, payload_bytes=1.01 * right.payload_bytes)

        calls.Record._event = event
        memory.MemoryTracker.live = property(lambda tracker: perturbed(true[1](tracker)))
    if counter == "one more":
        true_add = trace.add

        def add(event, key=None):
            true_add(event, key)
            for recorded, _ in trace._active:
                if sum(event.kind == one.kind for one in recorded.events) == 1:
                    recorded.events.append(event)

        trace.add = add
    return fn(world, *args)


def names_of(tree):
    """Names that a cell defines at its top level, and names that it uses anywhere."""
    defined = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return defined, {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def counting_cells(chapter):
    """The cells of a chapter that claim something about bytes or calls, and those that they need, in order."""
    (path,) = ROOT.glob(f"chapters/{chapter}_*.ipynb")
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    cells = [cell.source for cell in code if "remove-cell" not in cell.metadata.get("tags", [])]
    keep, wanted = [], set()
    for source in reversed(cells):
        if "Explorer(" in source or "wire_audit." in source:  # that asks the kernel
            continue
        defined, used = names_of(ast.parse(source))
        if ("claim(" in source and any(word in source for word in ASKS)) or defined & wanted:
            keep.append(source)
            wanted = (wanted | used) - defined
    return keep[::-1]


def kind_of(chapter, name, unit="", relation="=", rel=0, **_):
    """What a claim is about, "sent", "held" or "calls"; empty where a counter that is a little off changes nothing."""
    if relation != "=" or rel >= 0.01 or name.startswith(ELSEWHERE):
        return ""
    if name.startswith("all-reduces"):
        return "calls"
    if unit not in ("bytes", "B") and "units sent" not in name:
        return ""
    return "sent" if chapter[:2] in ALL_SENT or any(word in name for word in SENT) else "held"


@pytest.mark.chapters("each test executes most of a chapter")
@pytest.mark.slow("each test executes most of a chapter")
@pytest.mark.parametrize(
    ("chapter", "counter", "fewest"),
    [
        ("00", "none", {"calls": 1}),
        ("00", "one more", {"calls": 1}),
        ("01", "1% more", {"held": 10, "sent": 3}),
        ("01b", "1% more", {"held": 13}),
        ("02", "none", {"sent": 10}),
        ("02", "1% more", {"sent": 10}),
        ("02", "one more", {"sent": 10}),
        ("03", "none", {"sent": 6, "calls": 2}),
        ("03", "1% more", {"sent": 6, "calls": 2}),
        ("03", "one more", {"sent": 6, "calls": 2}),
        ("04", "1% more", {"sent": 5, "held": 8}),
        ("04b", "1% more", {"held": 18}),
        ("05", "1% more", {"sent": 5, "held": 8}),
        ("05", "one more", {"sent": 5, "held": 8}),
        ("05b", "1% more", {"held": 1}),
        ("06", "1% more", {"sent": 6}),
        ("06b", "1% more", {"sent": 2}),
        ("07", "1% more", {"sent": 6, "held": 13}),
        ("07b", "1% more", {"sent": 16, "held": 37}),
        ("08", "1% more", {"sent": 2, "held": 3}),
        ("08b", "1% more", {"sent": 4, "held": 4}),
        ("09", "1% more", {"held": 8}),
        ("11", "1% more", {"sent": 4}),
        ("12b", "1% more", {"held": 10}),
        ("13", "1% more", {"sent": 12}),
        ("13b", "1% more", {"held": 6}),
    ],
)
def test_claims_fail_exactly_where_their_counter_is_off(chapter, counter, fewest, monkeypatch):
    rows = []

    def note(name, *args, **kwargs):
        try:
            claim(name, *args, **kwargs)
            rows.append((name, kind_of(chapter, name, **kwargs), True))
        except ClaimError:
            rows.append((name, kind_of(chapter, name, **kwargs), False))

    monkeypatch.delenv("BOOK_CLAIMS", raising=False)
    for name in ("PAUSES_S", "_pauses_s"):  # a time is measured once
        monkeypatch.setattr(claims, name, (0,))
    monkeypatch.setattr(lib, "claim", note, raising=False)
    monkeypatch.setattr(lib, "run", lambda fn, n, *args, **kw: run(off, n, counter, fn, *args, **kw), raising=False)
    if chapter[:2] == "01":  # it watches the memory of this process
        live = memory.MemoryTracker.live.fget
        monkeypatch.setattr(memory.MemoryTracker, "live", property(lambda tracker: perturbed(live(tracker))))
    namespace = {"__name__": "chapter"}
    for source in counting_cells(chapter):
        exec(compile(source, "cell", "exec"), namespace)
    found = [kind for _, kind, _ in rows]
    assert {kind: found.count(kind) for kind in fewest if found.count(kind) < fewest[kind]} == {}
    assert [(name, good) for name, kind, good in rows if kind and good is (kind in MUST_FAIL[counter])] == []
