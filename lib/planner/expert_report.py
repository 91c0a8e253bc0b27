"""The report on a model with experts: parameters, memory and all-to-alls of a layout, and the layouts for each ep.

`book/static/experts.js` makes the same table from the same formulas, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib.cost.experts import ExpertShape
from lib.cost.hardware import device_text
from lib.planner.experts import (
    NO_SECONDS_OF_EXPERTS,
    ExpertLayout,
    ExpertTraining,
    exchanged_bytes,
    expert_refusal,
    layouts_by_ep,
    rank_bytes,
    rank_bytes_most,
    stage_blocks,
)
from lib.planner.margin import HEADROOM, memory_verdict, ran_text
from lib.planner.options import option_of
from lib.planner.report import MOST_PLACES, ranks_text, table, wrapped

AXES = ("tp", "pp", "dp", "ep")  # an option for one of these fixes the layout
TAKEN = (*AXES, "rows", "zero", "recompute")
HOW_COUNTED = (
    "counted: routing is even, so that a rank computes as many copies as its tokens send; a copy keeps its input and "
    "three vectors of the width of an expert, and attention as much as in a dense block; a busier expert needs more"
)
NO_ERROR_OF_EXPERTS = "the error of the memory is unknown: no published run of a model with experts says its memory"


@dataclass(frozen=True)
class ExpertReport:
    """What a rank holds and sends; `dataclasses.asdict` makes plain data of it.

    Each row of `by_ep` has `layout`; kind → bytes `held` on the rank with the highest peak; the `verdict` on it:
    fits, tight or does not fit; bytes `sent` in a step for each block with experts, by where they go.
    """

    model: str
    places: list[dict[str, Any]]  # of the layout that is asked for, if one is
    by_ep: list[dict[str, Any]]
    room_bytes: float
    batch: int  # sequences of a step
    notes: Sequence[str]
    assumes: Sequence[str]  # figures of the GPU, and bytes of a parameter
    asked: ExpertLayout | None = None
    headroom: float = HEADROOM  # of the memory; a layout that leaves less is tight

    def __str__(self) -> str:
        parts = [wrapped([self.model]), wrapped(self.notes)]
        if self.asked:
            parts += [self._held(), self._sent()]
        parts += [self._table(), wrapped([NO_ERROR_OF_EXPERTS, NO_SECONDS_OF_EXPERTS, HOW_COUNTED, *self.assumes])]
        return "\n\n".join(filter(None, parts))

    def _held(self) -> str:
        """A row for each place in the pipeline, in GB."""
        one, kinds = (
            self.asked,
            [kind for kind in self.places[0]["held"] if any(p["held"][kind] for p in self.places)],
        )
        words = [
            f"{one.tp * one.pp * one.dp} ranks = pp {one.pp} x dp {one.dp} x tp {one.tp}; experts on ep {one.ep} ranks "
            f"along dp, each held by edp {one.edp}; microbatches of {one.rows}, zero {one.zero}, "
            f"recompute {one.recompute}"
        ]
        rows = [["ranks", "blocks", *kinds]]
        for place in self.places:
            rows.append(
                [place["ranks"], str(place["blocks"]), *(f"{place['held'][kind] / 1e9:.2f}" for kind in kinds)]
            )
        if len(self.places) > MOST_PLACES:
            rows[MOST_PLACES // 2 : -MOST_PLACES // 2] = [["…", *[""] * (len(rows[0]) - 1)]]
        need = max(place["held"]["total"] for place in self.places)
        verdict = memory_verdict(need, self.room_bytes, self.headroom)
        said = f"GB; {verdict}: {need / 1e9:.1f} of {self.room_bytes / 1e9:.1f} GB"
        return wrapped([*words, table(rows), said, ran_text(need, self.room_bytes)])

    def _sent(self) -> str:
        """The all-to-alls of a block, and of all blocks of the rank that has most of them."""
        sent, blocks = exchanged_in_words(self.places[0]["sent"]), max(place["with_experts"] for place in self.places)
        rows = [["all-to-alls, sent by a rank in a step", "GB per block", f"GB in {blocks} blocks"]]
        for words, n in sent.items():
            rows.append([words, f"{n / 1e9:.3f}", f"{n * blocks / 1e9:.2f}"])
        return table(rows)

    def _table(self) -> str:
        """A row for each ep."""
        rows = [
            [
                *"ep edp tp pp dp".split(),
                "states GB",
                "activations GB",
                "total GB",
                "of",
                "verdict",
                "GB sent",
                "across",
            ]
        ]
        for row in self.by_ep:
            one, held, sent = row["layout"], row["held"], row["sent"]
            states, total = held["replicated"] + held["experts"], held["total"]
            sizes = [states, total - states, total]
            rows.append(
                [
                    *(str(one[axis]) for axis in ("ep", "edp", "tp", "pp", "dp")),
                    *(f"{n / 1e9:.1f}" for n in sizes),
                    f"{total / self.room_bytes:.0%}",
                    row["verdict"],
                    *(f"{n / 1e9:.3f}" for n in (sent["inside"] + sent["across"], sent["across"])),
                ]
            )
        one = self.by_ep[0]["layout"]
        words = (
            f"for each ep, the layout that fits with the fewest tp x pp ranks, a tight one only where all are tight, "
            f"or the smallest where none fits (microbatches of {one['rows']}, zero "
            f"{max(row['layout']['zero'] for row in self.by_ep)}, recompute {one['recompute']}); sent: by a rank for a "
            f"block in a step of {self.batch:,} sequences, and of that across nodes"
        )
        held = {row["layout"]["ep"]: row["held"]["total"] for row in self.by_ep}
        return wrapped([words, table(rows), *ran_by_ep(held, self.room_bytes)])


def ran_by_ep(held: Mapping[int, float], room_bytes: float) -> list[str]:
    """How many published layouts ran that were planned as full: a sentence for the layouts with the same share.

    Args:
        held: ep → bytes of the layout that was found for it.
    """
    same: dict[str, list[int]] = {}
    for ep, need in held.items():
        same.setdefault(ran_text(need, room_bytes), []).append(ep)
    return [f"ep {', '.join(map(str, eps))}: {said}" for said, eps in same.items()]


def exchanged_in_words(sent: Mapping[str, float]) -> dict[str, float]:
    """Words → bytes, of the all-to-alls of a block."""
    return {
        "inside a node": sent["inside"],
        "across nodes": sent["across"],
        "across nodes, if a token goes to each node at most once": sent["across_once"],
    }


def report_of_experts(
    of: ExpertTraining, asked: Mapping[str, Any], notes: Sequence[str] = (), headroom: float = HEADROOM
) -> ExpertReport:
    """The report of the layout that is asked for, if an axis is, and of the layouts for each ep.

    Args:
        asked: fields of a layout; an axis that is left out is 1, and dp follows.

    Raises:
        ValueError: an impossible layout, or a choice that is not counted with experts.
    """
    if left := [name for name in asked if name not in TAKEN and asked[name] not in (1, "1f1b", False)]:
        ways = ", ".join(map(option_of, TAKEN))
        raise ValueError(f"{option_of(left[0])} {asked[left[0]]} is not counted with experts: choose among {ways}")
    rows, zero, recompute = asked.get("rows", 1), asked.get("zero"), asked.get("recompute", "none")
    layout, places = None, []
    if any(axis in asked for axis in AXES):
        tp, pp = asked.get("tp", 1), asked.get("pp", 1)
        dp = asked.get("dp", max(1, of.training.cluster.gpus // (tp * pp)))
        layout = ExpertLayout(tp, pp, dp, asked.get("ep", 1), rows, int(dp > 1) if zero is None else zero, recompute)
        if why := expert_refusal(of, layout):
            raise ValueError(why)
        places = [_place_of(of, layout, place) for place in range(pp)]
    found = [_row_of(of, one, headroom) for one in layouts_by_ep(of, rows, zero, recompute, headroom)]
    run, said = of.training, expert_model_text(of.shape)
    asked_of = list(notes), _assumed(of), layout, headroom
    return ExpertReport(said, places, found, run.room_bytes, run.global_batch, *asked_of)


def _assumed(of: ExpertTraining) -> list[str]:
    cluster, recipe = of.training.cluster, of.training.stack.recipe
    kept = f"{recipe.weight_bytes} + {recipe.gradient_bytes} + {recipe.master_bytes} + {recipe.state_bytes}"
    of_gpu = f"GPU: {device_text(cluster.device, cluster.per_node)}"
    return [of_gpu, f"stack: {kept} bytes of a weight, its gradient, the rest of its master copy, optimizer states"]


def plain_report(report: ExpertReport) -> dict[str, Any]:
    """The report as plain data, with the sentences on errors, on seconds and on how it is counted."""
    asked = report.asked and report.asked._asdict()
    said = {"no_error": NO_ERROR_OF_EXPERTS, "no_seconds": NO_SECONDS_OF_EXPERTS, "counted": HOW_COUNTED}
    return asdict(report) | {"asked": asked} | said


def expert_model_text(shape: ExpertShape) -> str:
    """All sizes of a model with experts, in a sentence."""
    base, blocks = shape.base, blocks_with_experts(shape)
    active, looked_up = shape.num_active_parameters / 1e9, shape.end_parameters / 1e9
    shared = f", shared experts of width {shape.d_shared}" * bool(shape.d_shared)
    dense = f", {base.num_layers - blocks} blocks with an MLP of width {base.mlp_width}" * (blocks < base.num_layers)
    kind = "attention of low rank" if shape.latent else f"{base.num_kv_heads or base.num_heads} of keys and values"
    return (
        f"{shape.num_parameters / 1e9:.4g} billion parameters, {active:.4g} billion active for a token ("
        f"{active - looked_up:.4g} without the token embedding), {base.num_layers} blocks of width {base.d_model}, "
        f"{base.num_heads} heads of {base.d_head} ({kind}), {shape.num_experts} experts of width {shape.d_expert} in "
        f"{blocks} blocks, {shape.top_k} for each token{shared}{dense}, vocabulary {base.vocab_size}, sequences of "
        f"{base.context} tokens"
    )


def blocks_with_experts(shape: ExpertShape) -> int:
    """How many blocks have experts."""
    return shape.base.num_layers - shape.num_dense(shape.blocks)


def _place_of(of: ExpertTraining, layout: ExpertLayout, place: int) -> dict[str, Any]:
    n, held = layout.dp * layout.tp, rank_bytes(of, layout, place)
    blocks = stage_blocks(of.shape.base.num_layers, layout.pp)[place]
    return {
        "ranks": ranks_text(range(place * n, place * n + n)),
        "blocks": len(blocks),
        "with_experts": len(blocks) - of.shape.num_dense(blocks),
        "held": held._asdict() | {"total": held.total},
        "sent": exchanged_bytes(of, layout)._asdict(),
    }


def _row_of(of: ExpertTraining, layout: ExpertLayout, headroom: float) -> dict[str, Any]:
    held = rank_bytes_most(of, layout)
    return {
        "layout": layout._asdict() | {"edp": layout.edp},
        "held": held._asdict() | {"total": held.total},
        "verdict": memory_verdict(held.total, of.training.room_bytes, headroom),
        "sent": exchanged_bytes(of, layout)._asdict(),
    }
