"""The numbers of *Will it fit?*: what `lib.planner` knows of models, GPUs and stacks, as JSON in the page.

A page says `{planner}`. In the browser `static/planner*.js` compute with them, `static/model_config.js` reads the model
of a `config.json`, `static/experts.js` counts models with experts, and `static/will_it_fit.js` makes the controls and
shows what comes out. Where a page says `{planner_trust}`, a table says how far published runs were missed.
"""

import json
from dataclasses import MISSING, asdict, fields

from docutils import nodes
from docutils.parsers.rst import Directive
from live_page import add_live_page, table

from book.explain.configs import FOREIGN, OFF, USUAL_TOKENS
from book.published import STEPS
from lib.cost.adapters import ADAPTER_RECIPE, BASES
from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.experts import ExpertShape
from lib.cost.models import NOT_IN_A_NAME, NOT_MODELLED
from lib.cost.sizes import OPTIMIZERS, PLANNED_RECOMPUTE, ModelShape
from lib.planner import choices, least, margin, messages, search, seconds, sweep, ways_out
from lib.planner.evidence import EVIDENCE, OF_MEMORY, evidence_on, percent, read_evidence
from lib.planner.expert_report import HOW_COUNTED, NO_ERROR_OF_EXPERTS
from lib.planner.experts import NO_SECONDS_OF_EXPERTS
from lib.planner.libraries import LIBRARIES
from lib.planner.training import GPUS, NO_SECONDS, PRESET_MODELS, STACKS, Cluster, Stack, Training, stack_for

SCRIPTS = (
    "planner_context.js",
    "planner_sizes.js",
    "planner_messages.js",
    "planner_seconds.js",
    "planner_memory.js",
    "planner_margin.js",
    "planner_evidence.js",
    "planner_layouts.js",
    "planner_choices.js",
    "planner_search.js",
    "planner_ways_out.js",
    "planner.js",
    "planner_sweep.js",
    "model_config.js",
    "experts.js",
    "will_it_fit_messages.js",
    "will_it_fit_sweep.js",
    "will_it_fit.js",
)
QUANTITIES = {
    "seconds": "seconds of a step",
    "seconds in FP8": "seconds of a step in FP8",
    "memory": "peak memory",
}
HTML = """<div id="planner"><noscript><p><strong>This page computes in your browser, and JavaScript is switched off.
</strong> From a terminal, <code>python -m lib.planner --model llama-70b --gpus 64</code> says the same.</p></noscript>
<script type="application/json">{numbers}</script></div>"""


def plain_model(shape: ModelShape) -> dict:
    """Its sizes; where Python says None, what is meant."""
    heads = shape.num_kv_heads or shape.num_heads
    return asdict(shape) | {"num_kv_heads": heads, "d_mlp": shape.mlp_width, "head_dim": shape.d_head}


def plain_experts(shape: ExpertShape) -> dict:
    """The sizes of a model with experts as the script takes them."""
    return asdict(shape) | {"base": plain_model(shape.base)}


def plain_training(training: Training) -> dict:
    """A training as the script takes it."""
    adapters = training.adapters
    return {
        "model": plain_model(training.model),
        "device": asdict(training.cluster.device),
        "stack": asdict(training.stack),
        "gpus": training.cluster.gpus,
        "per_node": training.cluster.per_node,
        "global_batch": training.global_batch,
        "adapters": adapters and asdict(adapters) | {"base_bytes": adapters.base_bytes},
        "offload": training.offload,
        "optimizer": training.optimizer,
    }


def errors_said() -> dict:
    """The words behind ± for each GPU and stack, and how the script finds both from figures and constants.

    The page has no FP8. A GPU without a name is "", and so is a stack: figures or constants that are in no table.
    """
    words = {
        gpu: {
            stack: {
                quantity: str(evidence_on(quantity, gpu or None, stack or None)) for quantity in ("seconds", "memory")
            }
            for stack in (*STACKS, "")
        }
        for gpu in (*GPUS, "")
    }
    speeds = {gpu: [of.peak_flops, of.memory_Bps, of.link_Bps] for gpu, of in GPUS.items()}
    memory = {gpu: of.memory_bytes for gpu, of in GPUS.items()}
    ignored = [*OF_MEMORY, "fp8_speedup", *(one.name for one in fields(Stack) if not one.compare)]
    return {"words": words, "speeds": speeds, "memory": memory, "ignored": ignored}


def numbers() -> dict:
    """All that the script does not compute. A GPU whose network varies is left out."""
    gpus = {name: device for name, device in GPUS.items() if device.network_Bps}
    return {
        "models": {name: plain_model(shape) for name, shape in PRESET_MODELS.items()},
        "gpus": {name: asdict(device) for name, device in gpus.items()},
        "stacks": {name: {gpu: asdict(stack_for(name, gpu)) for gpu in gpus} for name in STACKS},
        "experts": {
            "models": {name: plain_experts(shape) for name, shape in EXPERT_MODELS.items()},
            "table": FOREIGN["experts"],
            "no_seconds": NO_SECONDS_OF_EXPERTS,
            "no_error": NO_ERROR_OF_EXPERTS,
            "counted": HOW_COUNTED,
        },
        "per_node": Cluster.per_node,
        "evidence": read_evidence(),
        "errors": errors_said(),
        "limits": {
            "rows": choices.MOST_ROWS,
            "stages_per_rank": choices.MOST_STAGES_PER_RANK,
            "nodes_of_tp": choices.MOST_NODES_OF_TP,
            "tokens_of_cp": choices.FEWEST_TOKENS,
            "cp_ranks": choices.CP_RANKS,
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
            "optimizers": OPTIMIZERS,
            "no_seconds": NO_SECONDS,
            "not_modelled": list(NOT_MODELLED),
            "bases": BASES,
            "adapter_recipe": asdict(ADAPTER_RECIPE),
            "choices": {
                "usual": {library: asdict(choices.usual_choices(library)) for library in LIBRARIES},
                "all": asdict(choices.ALL_OPEN),
            },
            "libraries": {library: of.name for library, of in LIBRARIES.items()},
            "worth": search.WORTH,
            "rounding": least.ROUNDING,
            "closed": ways_out.CLOSED,
            "most_nodes": ways_out.MOST_NODES,
            "cards": sorted(((name, of.memory_bytes) for name, of in GPUS.items()), key=lambda card: card[1]),
            "times_batch": sweep.TIMES_BATCH,
            "times_network": sweep.TIMES_NETWORK,
            "nodes_swept": sweep.NODES_SWEPT,
            "fell": sweep.FELL,
            "headroom": margin.HEADROOM,
            "ran_at_fill": [(start, *of) for start, of in sorted(margin.RAN_AT_FILL.items())],
            "compared": {name: asdict(recipe) for name, recipe in margin.compared_recipes().items()},
        },
        "foreign": {
            "config": FOREIGN["config"],
            "refused": FOREIGN["refused"],
            "fields": {one.name: None if one.default is MISSING else one.default for one in fields(ModelShape)},
            "off": OFF,
            "usual_tokens": USUAL_TOKENS,
            "not_modelled": NOT_MODELLED | NOT_IN_A_NAME,
        },
    }


def html() -> str:
    """Where the controls will be, with the numbers in it."""
    return HTML.format(numbers=json.dumps(numbers()))


def trust() -> str:
    """Errors on published runs that calibrated nothing, by stack and GPU; and the runs that calibrated a constant.

    The numbers are those that stand behind ± in an answer.
    """
    lines = []
    for name, of in read_evidence().items():
        for quantity, words in QUANTITIES.items():
            if missed := of.get(quantity):
                counts = str(missed["runs"]), str(missed["configurations"]), str(missed["in_view"])
                errors = ["" if missed[kind] is None else percent(missed[kind]) for kind in ("median", "worst")]
                cells = words, *counts, *errors, ", ".join(missed["calibrating"])
                lines.append(f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    heads = "stack, GPU", "of", "runs", "layouts", "in view", "median error", "worst", "calibrated on, not counted"
    return table("trust", heads, lines)


class Trust(Directive):
    """`{planner_trust}`."""

    def run(self) -> list[nodes.Node]:
        for path in (EVIDENCE, *STEPS):
            self.state.document.settings.env.note_dependency(str(path))
        return [nodes.raw("", trust(), format="html")]


def setup(app):
    app.add_directive("planner_trust", Trust)
    return add_live_page(app, "planner", html, ("lib/planner/*.py", "lib/cost/*.py", "book/explain/*"), SCRIPTS)
