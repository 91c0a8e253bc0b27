"""The house: three floors, each idea in its room, and imports go downward only."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("lib", "course", "book")  # what stands on one may import it, and it knows nothing of what stands on it
MOST_LINES_OF_A_FILE = 350  # and no other limit on size: a file is good when a stranger can read it aloud

# The root of lib keeps what a page names. A file may import those before it, and the rooms that stand there. What a
# room may import says its own __init__.py: the words in backticks behind "May import".
ROOT_FILES = """
text trace cost/ kineto/ runtime/ torchrun/ mesh launch comm
placement facts clip conjugate deferred recompute collectives losses moe model documents masks data memory versions
doctor/ verify data_parallel/ tensor_parallel/ context_parallel/ expert_parallel/ pipeline/ layout planner/
gradient_hooks gradient_ranks parallel_model parallel checkpoint/ training/ lab/ train
""".split()
PURE = [
    *("lib.cost", "lib.trace", "lib.kineto", "lib.lab.claims", "lib.pipeline.schedules", "lib.layout", "lib.planner"),
    *("lib.text", "lib.launch"),  # the server of `launch` starts before torch is there
    *(
        f"lib.runtime.{name}"
        for name in "asserts call_table calls hang headroom output own_rank places ranks server".split()
    ),
    *(f"lib.pipeline.{name}" for name in "balance simulate lower rendezvous prove gantt".split()),
    *(
        f"book.figures.{name}"
        for name in "svg canvas curves lanes matrices moves ranks scatter schedule timeline".split()
    ),
    *("course.workshop.typed", "book.figures.explorer", "book.figures.show", "book.explain", "book.published"),
]
SPEAKS_DISTRIBUTED = {
    *("lib.launch", "lib.mesh", "lib.comm", "lib.checkpoint", "lib.runtime", "lib.torchrun", "lib.doctor"),
    "course.check.listen",  # it listens to what a learner calls
    "course.exercises",  # learners may answer with it
    "book.trials.typed",  # a group that only pretends, for a type checker
}
# What starts ranks, lets them talk, and sees who hangs: a floor of its own, which needs only formulas of the rest. A
# copy of it works alone (`test_ground.py`).
GROUND = [f"lib.{name}" for name in "launch comm mesh trace kineto runtime torchrun doctor".split()]
SAME_NAMES = {
    "main",  # what `python -m` starts: lib.train, lib.doctor, course.check
    "train",  # the loop of lib.training.loop; lib.train is its command line
    "timeline",  # what lib.pipeline.execute measures; book.figures.timeline draws it
}
SERIAL_TWIN = ("lib.model", "lib.moe", "lib.losses")  # no witness if it were made of the same parts

FOLDERS = [ROOT / name for name in ("lib", "course", "book/explain", "book/figures", "book/published", "book/trials")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [ROOT / "book" / "__init__.py", *sorted(path for one in FOLDERS for path in one.rglob("*.py"))]
}
ROOMS = {module: path for module, path in MODULES.items() if path.name == "__init__.py" and module not in FLOORS}


def room_of(module):
    """The innermost room that a module is in, or None for a file of the root."""
    inside = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    return max(inside, key=len, default=None)


@cache
def declared(room):
    """What a room's own words let it import."""
    text = ast.get_docstring(ast.parse(ROOMS[room].read_text(encoding="utf-8")))
    said = re.search(r"May import(.*?)\.\s", text + "\n", re.DOTALL)
    assert said, f"{room} does not say what it may import"
    return set(re.findall(r"`((?:lib|course|book)[\w.]*)`", said[1]))


def imports(path):
    """(module, whether at import time) for all that a file imports of lib or torch.distributed, wherever it does so."""
    found = set()

    def visit(node, at_top):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: the path is the idea, so imports are absolute"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or name == "torch.distributed" else node.module for name in inside]
        found.update((name, at_top) for name in names)
        at_top = at_top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, at_top and not typing)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def within(module, places):
    return any(module == place or module.startswith(place + ".") for place in places)


def allowed(source, target):
    """Whether the module `source` may import `target`."""
    room, floor = room_of(source), FLOORS.index(source.partition(".")[0])
    if FLOORS.index(target.partition(".")[0]) > floor:
        return False
    if target in FLOORS or (room and within(target, [room])):
        return True
    if room is None:
        below = ROOT_FILES[: ROOT_FILES.index(source.removeprefix("lib."))]
        return within(target, [f"lib.{name.rstrip('/')}" for name in below])
    said = declared(room)
    outer = {further for one in said if one in ROOMS and room.startswith(one + ".") for further in declared(one)}
    return within(target, said | outer)


EDGES = sorted((module, name) for module, path in MODULES.items() for name, _ in imports(path) if name in MODULES)


def test_imports_are_those_that_are_declared():
    drawn = [f"{a} -> {b}" for a, b in EDGES if a not in FLOORS and b not in FLOORS]
    print("\n" + "\n".join(drawn))
    assert drawn
    wrong = [f"{a} imports {b}" for a, b in EDGES if a not in FLOORS and not allowed(a, b)]
    assert not wrong
    assert {b for a, b in EDGES if a in FLOORS} == {"lib.runtime.places"}, (
        "a floor says that it stands on lib, no more"
    )


def test_the_house_as_it_is(say):
    """Printed: each room, its files, and what they import of other rooms."""
    lines = []
    for room in [None, *ROOMS]:
        files = [m for m in MODULES if room_of(m) == room and m not in (*ROOMS, *FLOORS)]
        to = sorted({room_of(b) or b for a, b in EDGES if a in files and room_of(b) != room and b not in FLOORS})
        name = "lib/" if room is None else room.replace(".", "/") + "/"
        lines.append(f"{name:26} {' '.join(m.rpartition('.')[2] for m in files)}")
        lines += [f"{'':26} imports {' '.join(x.removeprefix('lib.') for x in to)}"] if room and to else []
    say("\n".join(lines))
    of_root = {m.removeprefix("lib.") for m in MODULES if room_of(m) is None and m not in FLOORS}
    of_root |= {f"{room.removeprefix('lib.')}/" for room in ROOMS if room.startswith("lib.") and room.count(".") == 1}
    assert of_root == {*ROOT_FILES}, "a file without a place (enter it in ROOT_FILES), or a place without a file"
    named = {*PURE, *SPEAKS_DISTRIBUTED, *SERIAL_TWIN}
    assert named <= {*MODULES}, "a name in a list of this file that does not exist"
    assert {room for room in ROOMS if not declared(room)} <= {"lib.cost", "lib.pipeline.schedules"}


def test_the_picture_in_contributing_is_this_house():
    """Each file of the root and each outer room once; what is imported lies on the same level or below."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = re.search(r"## The house.*?```\n(.*?)```", text, re.DOTALL)[1]
    levels = {}
    for level, lines in enumerate(picture.split("↓")):
        for line in lines.splitlines():
            for name in re.split(r"\s{3,}", line)[0].split():
                assert levels.setdefault(name.rstrip("/"), level) == level, f"{name} is there twice"
    outer = {module: module.split(".")[1] for module in MODULES if module not in FLOORS}
    assert set(levels) == set(outer.values())
    edges = [
        (a, b)
        for a, b in EDGES
        if not {a, b} & {*FLOORS} and {a, b} != {"course.check.catalogue", "course.exercises"}
    ]
    upward = [f"{a} -> {b}" for a, b in edges if levels[outer[a]] > levels[outer[b]]]
    assert not upward


@pytest.mark.parametrize(
    ("source", "target", "may"),
    [
        ("lib.comm", "lib.trace", True),
        ("lib.trace", "lib.comm", False),
        ("lib.model", "lib.verify", False),
        ("lib.train", "lib.data_parallel.ddp", True),
        ("lib.data_parallel.zero", "lib.data_parallel.ddp", True),
        ("lib.data_parallel.zero", "lib.tensor_parallel.linear", False),
        ("lib.pipeline.execute", "lib.pipeline.schedules.action", True),
        ("lib.pipeline.schedules.action", "lib.pipeline.execute", False),
        ("lib.pipeline.execute", "lib.data_parallel.ddp", False),
        ("lib.data_parallel.ddp", "lib.pipeline.simulate", False),
        ("lib.data_parallel.ddp", "book.figures.timeline", False),
        ("lib.data_parallel.ddp", "course.check.bill", False),
        ("lib.lab.claims", "lib.data_parallel.ddp", True),
        ("lib.data_parallel.ddp", "lib.lab.claims", False),
        ("course.check.bill", "book.figures.svg", False),
        ("book.figures.svg", "course.check.bill", False),
        ("lib.cost.comm", "lib.comm", False),
        ("course.exercises.ch04.e04_1_shard", "lib.data_parallel.flat", True),
    ],
)
def test_the_rule_itself(source, target, may):
    assert allowed(source, target) is may


def test_the_ground_imports_formulas_and_nothing_else():
    ours = [(a, b) for a, b in EDGES if within(a, GROUND) and b != "lib"]
    assert not [f"{a} -> {b}" for a, b in ours if not within(b, [*GROUND, "lib.cost"])]


def test_the_ground_knows_no_name_of_what_stands_on_it():
    """Also not in a string, by which it could be imported."""
    named = []
    for module in (module for module in MODULES if within(module, GROUND)):
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named += [f"{module}: {found}" for found in re.findall(r"\b(?:course|book)[./]\w+", node.value)]
    assert not named


def circle_in(edges):
    """The first circle that imports make, as a list; an empty one without."""
    below = {}
    for a, b in edges:
        below.setdefault(a, set()).add(b)
    through = set()  # from here nothing leads back

    def walk(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in through:
            for target in sorted(below.get(module, ())):
                if found := walk(target, [*path, module]):
                    return found
            through.add(module)
        return []

    return next(filter(None, (walk(module, []) for module in sorted(below))), [])


def test_there_is_no_circle():
    """Of files, wherever they import: at the top, in a function, or for a type checker. And of rooms."""
    assert circle_in([("a", "b"), ("b", "c"), ("d", "b"), ("c", "d")]) == ["b", "c", "d", "b"]
    files = [(a, b) for a, b in EDGES if b not in FLOORS]
    assert circle_in(files) == []
    folders = [(room_of(a), room_of(b)) for a, b in files if a != "course.check.catalogue"]  # it loads what is asked
    assert circle_in([(a, b) for a, b in folders if a and b and a != b]) == []


def test_the_serial_twin_stands_alone():
    assert not [b for a, b in EDGES if a in SERIAL_TWIN and b not in SERIAL_TWIN]


def test_only_the_machine_speaks_to_torch_distributed():
    outside = []
    for module, path in MODULES.items():
        if within(module, SPEAKS_DISTRIBUTED):
            continue
        outside += [module for name, _ in imports(path) if name.startswith("torch.distributed")]
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        outside += [
            module for node in tree if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
    assert not outside


def test_no_two_public_things_share_a_name():
    """A function or class has its name for itself, in the whole library; a module may be called as what it holds."""
    homes = {}
    for module, path in MODULES.items():
        if module.startswith("course.exercises."):
            continue  # each is read alone
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    for module in MODULES:
        name = module.rpartition(".")[2]
        exercise = module.startswith("course.check.")  # is called as what it asks for
        if not exercise and not any(within(home, [module]) for home in homes.get(name, [module])):
            homes[name].append(module)
    shared = {name: where for name, where in homes.items() if len(where) > 1 and name not in SAME_NAMES}
    assert not shared
    assert all(len(homes[name]) > 1 for name in SAME_NAMES), "allowed, and no longer needed"


def lines_of_code(path):
    """Without docstrings, comments and empty lines: nobody shall save on those."""
    text = path.read_text(encoding="utf-8")
    told = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            told.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate((line.strip() for line in text.splitlines()), 1)
    return sum(1 for i, line in lines if line and not line.startswith("#") and i not in told)


def test_no_file_is_long(say):
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: n for module, n in lines.items() if n > MOST_LINES_OF_A_FILE} == {}
    of_lib = [path for path in (ROOT / "lib").rglob("*.py")]
    whole = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in of_lib)
    code = sum(lines_of_code(path) for path in of_lib)
    longest = max(lines, key=lines.get)
    say(f"lib: {whole} lines, {code} of code, {len(of_lib)} files; the longest of all: {longest}, {lines[longest]}")


# `density` of packages that people read as models, at commits b5bcd76c, a1b4ee2, 92d63d4 and 59714b1.
READ_ALOUD = {"torchtitan": (5.9, 1.3), "torchgpipe": (7.9, 2.2), "nanochat": (9.3, 2.3), "picotron": (9.9, 1.2)}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def density(paths):
    """Syntax nodes for each line of code, and comprehensions for a hundred."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    code = sum(map(lines_of_code, paths))
    return len(nodes) / code, 100 * sum(isinstance(node, COMPREHENSIONS) for node in nodes) / code


def test_how_dense_each_room_is(say):
    """Printed beside the models, and no limit: in a dense room a reader stops, so look there for easier lines."""
    of_rooms = {}
    for module, path in MODULES.items():
        if path.name != "__init__.py" and not module.startswith("course.exercises."):
            of_rooms.setdefault(room_of(module) or "lib", []).append(path)
    rows = READ_ALOUD | {room: density(paths) for room, paths in of_rooms.items()}
    lines = [
        f"{name:24} {nodes:5.1f} {often:5.1f}" for name, (nodes, often) in sorted(rows.items(), key=lambda x: x[1])
    ]
    say("\n".join(["nodes in a line, comprehensions in a hundred", *lines]))
    assert {*of_rooms} > {"lib", "lib.runtime", "lib.planner", "course.check"}


def test_the_page_says_how_long_its_nine_files_take():
    page = (ROOT / "book" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d \| `(\S+)` \|.*\| (\d+) \|$", page, re.MULTILINE)
    minutes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) / 12 for path, _ in rows}
    assert {path: int(said) for path, said in rows} == {path: max(5, 5 * round(n / 5)) for path, n in minutes.items()}
    total = sum(int(said) for _, said in rows)
    assert len(rows) == 9 and f"in about {total} minutes" in page
    assert f"has all nine, in {total} minutes." in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_is_pure_does_not_load_torch():
    """One fresh interpreter: the pure modules, then `lib.launch`, whose server starts before torch is there."""
    pure = [m for m in MODULES if within(m, PURE)]
    program = f"""
import sys
for module in {["lib", *pure]!r}:
    __import__(module)
    loaded = [name for name in ("torch", "matplotlib", "IPython", "ipywidgets") if name in sys.modules]
    assert not loaded, f"{{module}} loads {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
