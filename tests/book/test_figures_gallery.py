"""One figure of each kind, for a page and for a phone: words readable, colours the page's, the same each time."""

import importlib
import inspect
import math
import pkgutil
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure as Sheet

import book.figures
from book.figures import raster
from book.figures.activations import Activation, Sent, draw_activations
from book.figures.calls import draw_calls
from book.figures.curves import draw_bars, draw_curves, draw_log_log
from book.figures.dots import BAD, DOT, NOTHING, RING, draw_dots
from book.figures.equal import draw_equal
from book.figures.fastest import draw_fastest
from book.figures.fingerprint import draw_fingerprint
from book.figures.links import draw_links
from book.figures.matrices import attention_cut, column_cut, draw_layer, mlp_cut, row_cut
from book.figures.memory import draw_memory
from book.figures.moves import draw_before_after, draw_collectives, draw_step
from book.figures.nodes import draw_nodes
from book.figures.orders import draw_token_orders
from book.figures.pipelines import draw_bubble, draw_dilution, draw_kept
from book.figures.poster import draw_poster
from book.figures.ranks import draw_boxes, draw_nested, draw_rank, draw_sums
from book.figures.scatter import Dot, draw_scatter
from book.figures.schedule import draw_block, draw_end, draw_gantt, draw_messages
from book.figures.sheet import Band, Line, draw_sheet
from book.figures.svg import NARROW, READABLE_PX, SMALLEST_PX, WIDE, Figure, color, variables
from book.figures.timeline import draw_timeline
from lib.cost import steps
from lib.memory import MemoryTracker
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lib.pipeline.simulate import Costs, simulate
from tests.book.drawn import check_words, paths, words_of

STRETCHES = [0.1 * i for i in range(30)]
STAGES = {"plain": 20, "ZeRO-1": 12, "ZeRO-2": 9, "ZeRO-3": 5}
SIZES = [64 * 4**k for k in range(13)]
FULL = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
LEVELS = [
    ("tp: 8 GPUs", 8, "a node, NVLink"),
    ("pp: 16 nodes", 16, "128 GPUs"),
    ("dp: 128 groups", 128, "16,384 GPUs"),
]
SENT = [Sent("all-gather", "→", "gather x"), Sent("reduce-scatter", "←"), Sent("all-gather", "→"), Sent("", "←")]


def losses() -> Figure:
    loss = [5.5 * math.exp(-i / 20) + 2.6 for i in range(60)]
    runs = {f"{n} ranks of one machine": loss for n in (1, 2, 4)}
    title = "The same run on one, two and four ranks, in float64 and without dropout"
    limit = {"byte frequencies alone": 3.19}
    return draw_curves(runs, x="step", y="loss (nats per byte)", title=title, alt="a", reference=limit)


def stages() -> Figure:
    curves = {name: (STRETCHES, [k + 5 * abs(math.sin(2 * x)) for x in STRETCHES]) for name, k in STAGES.items()}
    about = {"title": "A step on four ranks, float32", "alt": "a", "reference": {"ZeRO-3's predicted peak": 11.2}}
    return draw_curves(curves, x=("forward", "backward", "step"), y="MB on rank 0", **about)


def collectives() -> Figure:
    slopes = {"a": 3e-3, "b": 2e-3, "c": 5e-4}
    curves = {name: (SIZES, [30 + slope * size for size in SIZES]) for name, slope in slopes.items()}
    about = {"title": "All-reduce over 128 ranks, between nodes", "alt": "a", "height_range": (5, 2e10)}
    return draw_log_log(curves, x="array (bytes)", y="time (µs)", points=([2**20] * 3, [3e3, 2e3, 700]), **about)


def fastest() -> Figure:
    curves = {
        name: (SIZES, [steps.all_reduce_s(name, size, 64, 5e-6, 5e10) for size in SIZES]) for name in steps.ALL_REDUCE
    }
    return draw_fastest(curves, seconds=(5e-6, 6e3), title="Who wins an all-reduce over 64 ranks", alt="a")


def layouts() -> Figure:
    seed = random.Random(0)
    dots = [Dot(seed.uniform(20, 390), seed.uniform(50, 170)) for _ in range(150)]
    groups = {"fits": [dot for dot in dots if dot.x < 80], "does not fit": [dot for dot in dots if dot.x >= 80]}
    groups["fits"].append(Dot(60, 70, "tp 8", "#page"))
    title = "Llama 2 70B on 64 H100: a dot per layout"
    return draw_scatter(
        groups, x="GB on the fullest GPU", y="seconds per step", title=title, alt="a", limit=("80 GB", 80)
    )


def published() -> Figure:
    seed = random.Random(0)
    runs = [10 ** seed.uniform(0, 2.3) for _ in range(20)]
    groups = {f"Aleph Alpha {k}": [Dot(x, x * seed.uniform(0.8, 1.2)) for x in runs] for k in "ABCDEF"}
    names = {"x": "measured, seconds per step", "y": "predicted, seconds per step"}
    return draw_scatter(groups, **names, title="Predicted and measured", alt="a", log=True, equal=True)


def memory() -> Figure:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        for _ in range(2):
            with memory.phase("forward"):
                out = model(torch.randn(256, 64)).sum()
            with memory.phase("backward"):
                out.backward()
            with memory.phase("step"):
                optimizer.step()
    peak = {"predicted peak": memory.peak["total"]}
    return draw_memory(memory, title="Two training steps of a small GPT, measured", alt="a", predicted=peak)


def layer(items, ranks, cell) -> Figure:
    return draw_layer(items, ranks, cell=cell, title="What each of the ranks has of a layer, forward", alt="a")


def block() -> Figure:
    first, *places = [
        Activation(n, "1/8 of the tokens", tokens=1 / 8) for n in ("dropout, +, norm", "attention", *"abc")
    ]
    row = [first, *(item for pair in zip(SENT, places, strict=True) for item in pair)]
    return draw_activations(row, title="TP + SP, forward and backward", alt="a")


def bars() -> Figure:
    rows = {"plain data parallelism": (13.5, 13.5, 81), "ZeRO-3": (1.7, 1.7, 10.1)}
    kinds = ("parameter", "gradient", "optimizer state")
    parts = {name: dict(zip(kinds, values, strict=True)) for name, values in rows.items()}
    return draw_bars(parts, unit="GB", title="State on each rank", alt="a", outline={"ZeRO-3": 14})


def sheet() -> Figure:
    words = [Line("Data parallelism", "strong"), Line("the full model on each rank")]
    rows = [Band([[Line("The sheet", "title")]], (1,)), Band([words, words], (0.5, 0.5), True)]
    return draw_sheet(rows, alt="a", width=WIDE)


LANES = [
    (0, "compute", "forward", "", 0, 1000),
    (0, "compute", "backward", "", 1000, 3000),
    (1, "network", "comm", "bucket 10", 1500, 2500),
]

ABOUT = {"title": "t", "alt": "a"}
FIGURES = {
    "losses": losses,
    "stages": stages,
    "a long name": lambda: draw_curves(
        {"no sum": range(9), "summed": [0] * 9},
        x="step",
        y="largest difference of norm1.weight among four ranks",
        **ABOUT,
    ),
    "collectives": collectives,
    "layouts": layouts,
    "published": published,
    "memory": memory,
    "column": lambda: layer(column_cut(4, 6, 8), 2, 14),
    "row": lambda: layer(row_cut(4, 6, 8), 2, 14),
    "pair": lambda: layer(mlp_cut(8, 24, 48), 8, 3.1),
    "pair backward": lambda: layer(mlp_cut(8, 24, 48, backward=True), 6, 3.1),
    "too wide": lambda: layer(column_cut(8, 24, 300), 4, 5),
    "heads": lambda: layer(attention_cut(8, 16, 8, 8, 4), 4, 3.8),
    "shared heads": lambda: layer(attention_cut(6, 24, 4, 2, 4), 4, 3.4),
    "activations": block,
    "before and after": lambda: draw_before_after(FULL, [[111, 222, 333]] * 3, **ABOUT),
    "nothing": lambda: draw_before_after(FULL, [[111, 222, 333], None, None], **ABOUT),
    **{
        f"{name} {k}": lambda name=name, k=k: draw_step(steps.ALL_REDUCE[name](5), 5, k, alt="a")
        for name in steps.ALL_REDUCE
        for k in (1, len(steps.ALL_REDUCE[name](5)))
    },
    "rank": lambda: draw_rank(2, {"dp": 2, "pp": 2, "tp": 2}, alt="a"),
    "nested": lambda: draw_nested(LEVELS, alt="a"),
    "fingerprint": lambda: draw_fingerprint({"a norm": [1, 0.5]}, title="t", alt="a"),
    "shares and words": lambda: draw_fingerprint(
        {"a long name of a number": [1, 51.14, "12 × 8"], "b": [0, 1.0023, ""]},
        columns=("before", "in the file", "c"),
        near=1e-9,
        **ABOUT,
    ),
    "dots": lambda: draw_dots(
        {f"rank {k}, token {k}": (DOT, RING, BAD, NOTHING) * 6 for k in range(3)},
        [f"{k}" if k % 4 == 0 else "" for k in range(24)],
        legend={DOT: "finds it", RING: "looks, and is silent", BAD: "false alarm", NOTHING: "cannot look"},
        **ABOUT,
    ),
    "calls": lambda: draw_calls(
        [[("run", 0, "0F0"), ("send", 1, "1F0")], [("recv", 0, "1F0"), ("run", 1, "1B0")]], **ABOUT
    ),
    "nodes": lambda: draw_nodes(8, "450 GB/s", "50 GB/s", title="t", alt="a"),
    "sums": lambda: draw_sums({"a norm": ((0, 4), (0, 1, 4, 5))}, 8, title="t", alt="a"),
    "poster": lambda: draw_poster(title="t", alt="a"),
    "boxes": lambda: draw_boxes(2, 3, 12, title="t", alt="a"),
    "token orders": draw_token_orders,
    "token orders of two ranks": lambda: draw_token_orders(2),
    "messages": lambda: draw_messages(one_f_one_b(3, 3), **ABOUT),
    "schedule": lambda: draw_gantt(simulate(zb_v(4, 8)), **ABOUT),
    "sooner": lambda: draw_gantt({make.__name__: simulate(make(4, 8)) for make in (one_f_one_b, zb_h1)}, **ABOUT),
    "later": lambda: draw_gantt({make.__name__: simulate(make(4, 8)) for make in (zb_h1, one_f_one_b)}, **ABOUT),
    "a little sooner": lambda: draw_timeline({"with a name that is long": LANES, "b": LANES[:1]}, **ABOUT),
    "the next step": lambda: draw_timeline({"a": [(*LANES[1][:4], 0, 5000)], "b": LANES}, again=True, **ABOUT),
    "predicted": lambda: draw_gantt(simulate(zb_h1(4, 8)), predicted=simulate(zb_h1(4, 8)), **ABOUT),
    "block": lambda: draw_block(
        {"1F1B": simulate(one_f_one_b(4, 8)), "ZB-V": simulate(zb_v(4, 8), Costs(0.5, 0.5, 0.5))}, 9, 15, **ABOUT
    ),
    "end": lambda: draw_end(simulate(zb_h1(4, 8), Costs(2, 2, 1)), (0, 1), 32, **ABOUT),
    "dilution": lambda: draw_dilution({2**k: 15 / (15 + 2**k) for k in range(9)}, 256, **ABOUT),
    "six": lambda: draw_collectives({"all-reduce": (FULL, [[111, 222, 333]] * 3)}, who=lambda _: [0, 1, 2], **ABOUT),
    "equal": lambda: draw_equal(
        {"1 rank": [5.0, 4.0, 3.0], "2 ranks": [5.0, 4 + 1e-15, 3.0], "4 ranks": [5.0, 4.0, 3 + 1e-13]},
        limit=1e-9,
        reference=("byte frequencies alone", 4.2),
        changes={1: "4 ranks"},
        **ABOUT,
    ),
    "bubble": lambda: draw_bubble(simulate(gpipe(8, 16)), **ABOUT),
    "kept": lambda: draw_kept([simulate(make(8, 16)) for make in (gpipe, one_f_one_b)], most=16, **ABOUT),
    "fastest": fastest,
    "links": lambda: draw_links(
        {(a, b): 900.0 / (1 + a + b) for a in range(8) for b in range(8) if a != b},
        unit="MB/s",
        marked={(1, 3): "x"},
        **ABOUT,
    ),
    "bars": bars,
    "sheet": sheet,
    "lanes": lambda: draw_timeline(LANES, title="A step", alt="a"),
}


def as_html() -> list[str]:
    """Every figure but the one that is measured, and an Explorer."""
    from tests.book.test_figures_explorer import buckets

    return [buckets()._repr_html_(), *(draw()._repr_html_() for name, draw in FIGURES.items() if name != "memory")]


def test_every_kind_of_figure_is_here():
    names = [module.name for module in pkgutil.iter_modules(book.figures.__path__, "book.figures.")]
    found = {
        name
        for module in map(importlib.import_module, names)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if inspect.signature(function).return_annotation == "Figure" and not name.startswith("_")
    }
    source = inspect.getsource(inspect.getmodule(test_every_kind_of_figure_is_here))
    assert len(found) > 10 and [name for name in sorted(found) if f"{name}(" not in source] == []


@pytest.mark.parametrize("name", FIGURES)
def test_words_have_their_place_and_colours_are_the_pages(name):
    figure = FIGURES[name]()
    raster.draw(figure._repr_html_(), Sheet(), (0, 0, NARROW, NARROW))  # nothing in it is unknown there
    for svg, most in ((figure.svg, WIDE), (figure.narrow, NARROW)):
        check_words(svg)
        width, least = (float(re.search(one, svg)[1]) for one in (r'viewBox="0 0 ([\d.]+) ', r"min-width:(\d+)px"))
        assert width <= most and least == pytest.approx(width * READABLE_PX / SMALLEST_PX, abs=0.5)
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', svg))) >= SMALLEST_PX
        without = re.sub(r"var\(--pbh-[\w-]+, (#\w{6}|currentColor|color-mix\([^()]*\))\)", "", svg)
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?!\))", without.replace("url(#hatched-", "")), (
            "a colour of its own"
        )
        assert set(re.findall(r"var\((--pbh-[\w-]+)", svg)) <= set(variables("light"))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("losses", [*(f"{n} ranks of one machine" for n in (1, 2, 4)), "byte frequencies alone 3.19"]),
        ("stages", [*STAGES, "ZeRO-3's predicted peak 11.2"]),
        ("collectives", "abc"),
    ],
)
def test_lines_are_named_in_a_legend_above_the_axes(name, named):
    """Nothing that is named there can lie on a line, and each name has a sample of its line."""
    narrow = Figure(FIGURES[name]().narrow, "")
    top = min(path.box[1] for path in paths(narrow, stroke="rule"))
    places = {words: (left, bottom) for words, left, _, _, bottom in words_of(narrow.svg)}
    samples = [path for path in paths(narrow, fill="none") if path.box[3] < top]
    axes = {(color("rule"), None), (color("soft"), None)}
    looks = [
        {(path.paint["stroke"], path.paint.get("stroke-dasharray")) for path in some}
        for some in (samples, paths(narrow, fill="none"))
    ]
    assert looks[0] == looks[1] - axes and len(samples) == len(named) == len(looks[0])
    for words in named:
        left, bottom = places[words]
        beside = [s for s in samples if 0 < left - s.box[2] < 10 and 0 < bottom - s.middle[1] < 15]
        assert len(beside) == 1 and bottom < top - 15, words


PRINTED = """
import sys, matplotlib
before = matplotlib.rcParams.copy()
from tests.book.test_figures_gallery import as_html
print(as_html())
assert matplotlib.rcParams.copy() == before and "matplotlib.pyplot" not in sys.modules
"""


def test_figures_are_the_same_in_every_run_and_leave_no_trace():
    """No pyplot, whose figures stay in a notebook and whose backend is the reader's; no setting that is another."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", PRINTED],
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        for seed in "12"
    ]
    assert [done.stderr for done in runs] == ["", ""] and runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout) > 50_000
