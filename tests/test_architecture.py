"""The house: each idea has its room, and imports go downward only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIB = ROOT / "lib"
# A file, whole; and the code of all that one has to read to know how a model is trained on many ranks: what a diligent
# reader gets through in a week. Who only turns the pages needs no line of what grades and what draws.
MAX_LINES, BUDGET_LINES = 350, 7000
APART = ("lib.check", "lib.plot", "lib.svg", "lib.explorer", "lib.show")

# A: pure Python, no torch. B: the machine. C: building blocks. D: the techniques. E: put together, looked at.
FLOORS = {
    "A": [
        *("trace", "sizes", "cost", "speed", "steps", "watch", "room", "prints"),
        *("link", "hardware", "bubble", "planner", "svg", "explorer", "show"),
    ],
    "B": ["launch", "processes", "server", "rank", "mesh", "transfer", "comm"],
    "C": ["clip", "wire", "collectives", "deferred", "layout", "conjugate", "model", "data", "memory", "pretend"],
    "D": ["data_parallel", "tensor_parallel", "pipeline"],
    "E": [
        "parallel3d",
        "train",
        "train_config",
        "checkpoint",
        "verify",
        "plot",
        "plot_memory",
        "plot_moves",
        "plot_log",
        "plot_cut",
        "plot_schedule",
        "check",
    ],
}
A_IN_PIPELINE = [
    "action",
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zero_bubble",
    "simulate",
    "lower",
    "rendezvous",
    "check",
    "gantt",
    "workshop",
]
SPEAKS_DISTRIBUTED = {"lib.launch", "lib.rank", "lib.mesh", "lib.transfer", "lib.comm", "lib.checkpoint"}
SPEAKS_DISTRIBUTED |= {"lib.check.listen"}  # it listens to what a learner calls
SERIAL_TWIN = "lib.model"  # no witness if it were made of the same parts

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(LIB.rglob("*.py"))
}


def floor(module):
    """Letter of a module's floor, and the folder whose files may import each other."""
    parts = module.split(".")
    if len(parts) > 2 and parts[1] == "pipeline" and parts[2] in A_IN_PIPELINE:
        return "A", "pipeline"
    found = [letter for letter, rooms in FLOORS.items() if parts[1] in rooms]
    assert found, f"{module} has no floor: enter it in FLOORS"
    return found[0], parts[1]


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


def downward(source, target):
    """Whether the module `source` may import `target`."""
    if target == "lib":
        return True
    (high, room), (low, other_room) = floor(source), floor(target)
    if high == "D" and low == "D" or low == "A" and target.startswith("lib.pipeline") and high == "D":
        return room == other_room  # the techniques never import each other
    return low <= high


EDGES = sorted((module, name) for module, path in MODULES.items() for name, _ in imports(path) if name in MODULES)


def test_imports_go_downward_only():
    drawn = [f"{floor(a)[0]} {a} -> {floor(b)[0]} {b}" for a, b in EDGES if a != "lib" and b != "lib"]
    print("\n" + "\n".join(drawn))
    assert drawn
    wrong = [f"{a} imports {b}" for a, b in EDGES if a != "lib" and not downward(a, b)]
    assert not wrong
    assert not [a for a, b in EDGES if a == "lib"], "lib itself imports nothing before it is asked for"


@pytest.mark.parametrize(
    ("source", "target", "may"),
    [
        ("lib.comm", "lib.trace", True),
        ("lib.trace", "lib.comm", False),
        ("lib.model", "lib.verify", False),
        ("lib.train", "lib.data_parallel.ddp", True),
        ("lib.data_parallel.zero", "lib.data_parallel.ddp", True),
        ("lib.data_parallel.zero", "lib.tensor_parallel.linear", False),
        ("lib.pipeline.execute", "lib.pipeline.action", True),
        ("lib.pipeline.action", "lib.pipeline.execute", False),
        ("lib.pipeline.execute", "lib.data_parallel.ddp", False),
        ("lib.planner", "lib.pipeline.simulate", True),
        ("lib.data_parallel.ddp", "lib.pipeline.simulate", False),
        ("lib.data_parallel.ddp", "lib.plot", False),
    ],
)
def test_the_rule_itself(source, target, may):
    assert downward(source, target) is may


def test_there_is_no_circle():
    below = {}
    for a, b in EDGES:
        below.setdefault(a, set()).add(b)

    def walk(module, path):
        assert module not in path, " -> ".join([*path, module])
        for target in below.get(module, ()):
            walk(target, [*path, module])

    at_top = {(m, name) for m, path in MODULES.items() for name, top in imports(path) if top and name in MODULES}
    below = {}
    for a, b in at_top:
        below.setdefault(a, set()).add(b)
    for module in below:
        walk(module, [])


def test_the_serial_twin_stands_alone():
    assert not [b for a, b in EDGES if a == SERIAL_TWIN and floor(b)[0] in "BD"]


def test_only_the_machine_speaks_to_torch_distributed():
    outside = []
    for module, path in MODULES.items():
        if module in SPEAKS_DISTRIBUTED:
            continue
        outside += [module for name, _ in imports(path) if name.startswith("torch.distributed")]
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        outside += [
            module for node in tree if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
    assert not outside


def lines_of_code(path):
    """Without docstrings, comments and empty lines: nobody shall save on those."""
    text = path.read_text(encoding="utf-8")
    told = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            told.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate((line.strip() for line in text.splitlines()), 1)
    return sum(1 for i, line in lines if line and not line.startswith("#") and i not in told)


def test_no_file_is_long_and_the_whole_is_small(capsys):
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: n for module, n in lines.items() if n > MAX_LINES} == {}
    total = sum(lines_of_code(path) for module, path in MODULES.items() if not module.startswith(APART))
    with capsys.disabled():
        print(f"\nlib has {total} lines of code of {BUDGET_LINES}; longest file: {max(lines, key=lines.get)}")
    assert total <= BUDGET_LINES


def test_the_pure_floor_and_the_launcher_do_not_load_torch():
    """One fresh interpreter: the modules of floor A, then `lib.launch`, whose server starts before torch is there."""
    pure = [m for m in MODULES if m != "lib" and floor(m)[0] == "A"]
    program = f"""
import sys
for module in {["lib", *pure, "lib.launch"]!r}:
    __import__(module)
    loaded = [name for name in ("torch", "matplotlib", "IPython", "ipywidgets") if name in sys.modules]
    assert not loaded, f"{{module}} loads {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
