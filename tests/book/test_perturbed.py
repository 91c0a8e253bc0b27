"""The chapters' own claims notice when a counter is off: of what was sent, and of what was held in memory."""

import ast
import copy
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch

import lib
from lib import claim, comm, cost, memory, run
from lib.lab import claims
from lib.lab.claims import ClaimError
from lib.runtime import calls
from lib.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.chapters("each test executes most of a chapter"),
    pytest.mark.slow("each test executes most of a chapter"),
]


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.delenv("BOOK_CLAIMS", raising=False)
    for name in ("PAUSES_S", "_pauses_s"):  # a time is measured once, so that all counters look at the same runs
        monkeypatch.setattr(claims, name, (0,))


def holds(*args, **kwargs):
    """Whether a claim holds."""
    try:
        claim(*args, **kwargs)
        return True
    except ClaimError:
        return False


def one_more(world, fn, *args):
    """In a rank: one more all-reduce of a single number, labelled like the first one with EXTRA behind."""
    true, done = comm.all_reduce_start, []

    def start(x, group, *more, **named):
        pending = true(x, group, *more, **named)
        if not done and group.size > 1:
            done.append(True)
            with comm.label(calls._label + EXTRA):
                true(torch.ones(1), group).wait()
        return pending

    comm.all_reduce_start = start
    return fn(world, *args)


EXTRA = ", once more"
COUNTERS = {  # what a counter says of an event that took place, or of the extra one
    "right": lambda event: [] if event.label.endswith(EXTRA) else [event],
    "one more": lambda event: [event],
    "1% more": lambda event: (
        [] if event.label.endswith(EXTRA) else [replace(event, wire_bytes=1.01 * event.wire_bytes)]
    ),
}


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
    notebook = nbformat.read(ROOT / "chapters" / chapter, as_version=4)
    cells = [
        c.source for c in notebook.cells if c.cell_type == "code" and "remove-cell" not in c.metadata.get("tags", [])
    ]
    cells = [
        source for source in cells if "Explorer(" not in source and "wire_audit." not in source
    ]  # that asks the kernel
    keep, wanted = [], set()
    for source in reversed(cells):
        defined, used = names_of(ast.parse(source))
        words = ('unit="bytes"', 'unit="B"', '"all-reduces', "units sent")
        counts = any(word in source for word in words) and "claim(" in source
        if counts or defined & wanted:
            keep.append(source)
            wanted = (wanted | used) - defined
    return keep[::-1]


@pytest.mark.parametrize("chapter", ["00_start.ipynb", "03_data_parallelism.ipynb"])
def test_the_chapters_claims_fail_when_a_counter_is_perturbed(chapter, monkeypatch):
    cells = [compile(source, "cell", "exec") for source in counting_cells(chapter)]
    happened = []  # each run takes place once, with the extra message in it; the counters then look at it
    for counter, seen_as in COUNTERS.items():
        replay = iter(list(happened))
        rows = []

        def counted(fn, n, *args, counter=counter, replay=replay, seen_as=seen_as, **kwargs):
            if counter == "right":
                happened.append(run(one_more, n, fn, *args, **kwargs))
            result = copy.copy(happened[-1] if counter == "right" else next(replay))
            if result.trace is not None:
                result.trace = Trace([x for e in result.trace.events for x in seen_as(e)], result.trace.spans)
            return result

        def note(name, *args, rows=rows, **kwargs):
            what = "bytes" if kwargs.get("unit") == "bytes" else "calls" if name.startswith("all-reduces") else ""
            what = "bound" if kwargs.get("relation", "=") != "=" else what
            rows.append((name, what, holds(name, *args, **kwargs)))

        monkeypatch.setattr(lib, "run", counted, raising=False)
        monkeypatch.setattr(lib, "claim", note, raising=False)
        namespace = {"__name__": "chapter"}
        for cell in cells:
            exec(cell, namespace)
        must_fail = {"right": (), "one more": ("bytes", "calls"), "1% more": ("bytes",)}[counter]
        for name, what, held in rows:
            assert held is (what not in must_fail) or what == "bound", (counter, name)
        found = [sum(what == kind for _, what, _ in rows) for kind in ("bytes", "calls")]
        assert found == ([0, 1] if chapter.startswith("00") else [6, 2])


def test_what_is_counted_is_what_cost_says():
    def counted(world, factor):
        true = cost.wire_bytes
        cost.wire_bytes = lambda *what: factor * true(*what)
        comm.all_reduce(torch.ones(6), world)

    sent = [run(counted, 3, factor, trace=True).trace.select(rank=2).wire_bytes for factor in (1, 1.01)]
    assert sent == pytest.approx([2 * 2 / 3 * 24, 1.01 * 2 * 2 / 3 * 24], rel=1e-12)


MESSAGES = {  # what a counter says of the messages that were sent
    "right": lambda events: events,
    "one more": lambda events: (
        events + [next(e for e in events if e.rank == rank) for rank in {e.rank for e in events}]
    ),
    "1% more": lambda events: [replace(e, payload_bytes=1.01 * e.payload_bytes) for e in events],
}


@pytest.mark.parametrize("counter", MESSAGES)
def test_the_claims_about_messages_fail_when_their_counter_is_perturbed(counter, monkeypatch):
    rows = []

    def counted(*args, **kwargs):
        result = run(*args, **kwargs)
        if result.trace is not None:
            result.trace = Trace(MESSAGES[counter]([e for e in result.trace.events if e.kind == "send"]))
        return result

    def note(*args, **kwargs):
        held = holds(*args, **kwargs)
        if kwargs.get("unit") == "bytes":
            rows.append(held)

    monkeypatch.setattr(lib, "run", counted, raising=False)
    monkeypatch.setattr(lib, "claim", note, raising=False)
    namespace = {"__name__": "chapter"}
    for cell in counting_cells("02_collectives.ipynb"):
        exec(compile(cell, "cell", "exec"), namespace)
    assert len(rows) >= 10 and set(rows) == {counter == "right"}


def perturbed(value):
    """A result of a run in which all that a memory tracker counted is 1% more."""
    if isinstance(value, dict) and "activation" in value:
        return {kind: round(1.01 * n_bytes) for kind, n_bytes in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(perturbed, value))
    return value


def test_the_claims_about_memory_fail_when_the_tracker_is_perturbed(monkeypatch):
    rows, tracker = [], memory.MemoryTracker

    class Perturbed(tracker):
        @property
        def live(self):
            return perturbed(tracker.live.fget(self))

    def note(name, *args, **kwargs):
        if kwargs.get("unit") == "bytes":
            rows.append(name if holds(name, *args, **kwargs) else "")

    monkeypatch.setattr(memory, "MemoryTracker", Perturbed)
    # Sent to a rank by name, where the name stands for the true one: there the results are perturbed.
    Perturbed.__module__, Perturbed.__qualname__ = tracker.__module__, tracker.__qualname__
    monkeypatch.setattr(lib, "claim", note, raising=False)
    monkeypatch.setattr(lib, "run", lambda *args, **kw: list(map(perturbed, run(*args, **kw))), raising=False)
    namespace = {"__name__": "chapter"}
    for source in counting_cells("01_memory.ipynb"):
        exec(compile(source, "cell", "exec"), namespace)
    assert len(rows) >= 20
    assert [name for name in rows if name] == []


def off(world, counter, fn, *args):
    """In a rank: a byte that is sent or held counts as 1.01, or a gather sends a number more."""
    if counter == "1% more":
        cost.wire_bytes = lambda *what, true=cost.wire_bytes: 1.01 * true(*what)
        live = property(lambda tracker, true=memory.MemoryTracker.live.fget: perturbed(true(tracker)))
        memory.MemoryTracker.live = live
    else:

        def start(x, group, *more, true=comm.all_gather_start, **named):
            comm.all_reduce(torch.ones(1), group)
            return true(x, group, *more, **named)

        comm.all_gather_start = start
    return fn(world, *args)


# Claims in bytes that neither counter has a part in: of shapes, and of a payload.
ELSEWHERE = ("state over all", "one all-reduce, of norms")
SENT = ("sent", "sends", "after forward", "tp: ", "pp: ", "dp: ")  # in the name of a claim about messages


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("chapter", "counter", "sent", "held"),
    [
        ("04_zero.ipynb", "1% more", 5, 8),
        ("05_fsdp.ipynb", "1% more", 5, 8),
        ("05_fsdp.ipynb", "one more", 5, 8),
        ("06_tensor_parallelism.ipynb", "1% more", 10, 0),
        ("07_sequence_parallelism.ipynb", "1% more", 13, 25),
        ("08_pipelines.ipynb", "1% more", 6, 3),
        ("09_one_f_one_b.ipynb", "1% more", 0, 8),
        ("11_interleaving.ipynb", "1% more", 4, 0),
        ("12_zero_bubble.ipynb", "1% more", 0, 6),
        ("13_3d_parallelism.ipynb", "1% more", 12, 6),
    ],
)
def test_the_claims_fail_when_a_counter_in_the_ranks_is_perturbed(chapter, counter, sent, held, monkeypatch):
    rows = []

    def note(name, *args, **kwargs):
        good = holds(name, *args, **kwargs)
        asks_a_counter = (kwargs.get("unit") in ("bytes", "B") or "units sent" in name) and not name.startswith(
            ELSEWHERE
        )
        if asks_a_counter and kwargs.get("relation", "=") == "=" and kwargs.get("rel", 0) < 0.01:
            is_sent = chapter.startswith("06") or any(word in name for word in SENT)
            rows.append((name, "sent" if is_sent else "held", good))

    monkeypatch.setattr(lib, "claim", note, raising=False)
    monkeypatch.setattr(lib, "run", lambda fn, n, *args, **kw: run(off, n, counter, fn, *args, **kw), raising=False)
    namespace = {"__name__": "chapter"}
    for source in counting_cells(chapter):
        exec(compile(source, "cell", "exec"), namespace)
    assert sum(kind == "sent" for _, kind, _ in rows) >= sent and sum(kind == "held" for _, kind, _ in rows) >= held
    fail = {"1% more": ("sent", "held"), "one more": ("sent",)}[counter]
    assert [(name, good) for name, kind, good in rows if good is (kind in fail)] == []
