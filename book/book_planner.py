"""The numbers of *Will it fit?*: what `lib.planner` knows of models, GPUs and stacks, as JSON in the page.

A page says `{planner}`. In the browser `static/planner*.js` compute with them, `static/model_config.js` reads the model
of a `config.json`, and `static/will_it_fit.js` makes the controls and shows what comes out. Where a page says
`{planner_trust}`, a table says how far published runs were missed.
"""

import json
from dataclasses import MISSING, asdict, fields
from itertools import chain

from docutils import nodes
from docutils.parsers.rst import Directive
from live_page import ROOT, add_live_page, table

from book.explain.configs import FOREIGN, OFF, USUAL_TOKENS
from book.published import LATER, RUNS
from book.published.rows import predict, read_rows, rows_json
from lib.cost.models import NOT_MODELLED
from lib.cost.sizes import PLANNED_RECOMPUTE, ModelShape
from lib.planner import messages, search, seconds
from lib.planner.training import GPUS, PRESET_MODELS, STACKS, Cluster, Training, stack_for

SCRIPTS = (
    "planner_sizes.js",
    "planner_messages.js",
    "planner_seconds.js",
    "planner_memory.js",
    "planner_layouts.js",
    "planner.js",
    "model_config.js",
    "will_it_fit_messages.js",
    "will_it_fit.js",
)
CHOSEN = {
    "calibrated": "runs that calibrate a constant",
    "in view": "runs in view when constants were chosen",
    "later": "runs that came later",
    "kept back": "runs kept back",
}
HTML = """<div id="planner"><noscript><p><strong>This page computes in your browser, and JavaScript is switched off.
</strong> From a terminal, <code>python -m lib.planner --model llama-70b --gpus 64</code> says the same.</p></noscript>
<script type="application/json">{numbers}</script></div>"""


def plain_model(shape: ModelShape) -> dict:
    """Its sizes; where Python says None, what is meant."""
    heads = shape.num_kv_heads or shape.num_heads
    return asdict(shape) | {"num_kv_heads": heads, "d_mlp": shape.mlp_width, "head_dim": shape.d_head}


def plain_training(training: Training) -> dict:
    """A training as the script takes it."""
    return {
        "model": plain_model(training.model),
        "device": asdict(training.cluster.device),
        "stack": asdict(training.stack),
        "gpus": training.cluster.gpus,
        "per_node": training.cluster.per_node,
        "global_batch": training.global_batch,
    }


def numbers() -> dict:
    """All that the script does not compute. A GPU whose network varies is left out."""
    gpus = {name: device for name, device in GPUS.items() if device.network_Bps}
    return {
        "models": {name: plain_model(shape) for name, shape in PRESET_MODELS.items()},
        "gpus": {name: asdict(device) for name, device in gpus.items()},
        "stacks": {name: {gpu: asdict(stack_for(name, gpu)) for gpu in gpus} for name in STACKS},
        "per_node": Cluster.per_node,
        "limits": {
            "rows": search.MOST_ROWS,
            "stages_per_rank": search.MOST_STAGES_PER_RANK,
            "nodes_of_tp": search.MOST_NODES_OF_TP,
            "tokens_of_cp": search.FEWEST_TOKENS,
            "optimizer_bytes": seconds.OPTIMIZER_BYTES,
            "tp_sums": seconds.TP_SUMS,
            "bucket": seconds.BUCKET,
            "bucket_of_a_rank": seconds.BUCKET_OF_A_RANK,
            "messages": {
                "begin_s": messages.BEGIN_S,
                "link_step_s": messages.LINK_STEP_S,
                "network_step_s": messages.NETWORK_STEP_S,
                "tree_begin_s": messages.TREE_BEGIN_S,
                "tree_link_s": messages.TREE_LINK_S,
                "tree_network_s": messages.TREE_NETWORK_S,
                "tree_bandwidth": messages.TREE_BANDWIDTH,
            },
            "recompute": PLANNED_RECOMPUTE,
        },
        "foreign": {
            "config": FOREIGN["config"],
            "refused": FOREIGN["refused"],
            "fields": {one.name: None if one.default is MISSING else one.default for one in fields(ModelShape)},
            "off": OFF,
            "usual_tokens": USUAL_TOKENS,
            "not_modelled": NOT_MODELLED,
        },
    }


def html() -> str:
    """Where the controls will be, with the numbers in it."""
    return HTML.format(numbers=json.dumps(numbers()))


def trust() -> str:
    """Errors of a step by stack and GPU, and by when the constants were chosen: those of all published runs.

    Rows with something that is not modelled, such as FP8, count in neither.
    """
    found = [predict(row) for path in (RUNS, LATER) for row in read_rows(path)]
    by = rows_json([one for one in found if not one.without])
    groups = (by["stacks"].items(), [(CHOSEN[name], of) for name, of in by["evidence"].items() if name in CHOSEN])
    lines = [
        f'<tr><th scope="row">{name}</th><td>{of["runs"]}</td><td>{of["configurations"]}</td>'
        f"<td>{of['median']:.1%}</td><td>{of['worst']:.1%}</td></tr>"
        for name, of in chain(*groups)
    ]
    return table("trust", ("stack, GPU", "runs", "configurations", "median error", "worst"), lines)


class Trust(Directive):
    """`{planner_trust}`."""

    def run(self) -> list[nodes.Node]:
        for path in (RUNS, LATER, *ROOT.glob("lib/planner/*.py"), *ROOT.glob("book/published/*.py")):
            self.state.document.settings.env.note_dependency(str(path))
        return [nodes.raw("", trust(), format="html")]


def setup(app):
    app.add_directive("planner_trust", Trust)
    return add_live_page(app, "planner", html, ("lib/planner/*.py", "lib/cost/*.py", "book/explain/*"), SCRIPTS)
