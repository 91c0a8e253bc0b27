"""Published steps of models with experts against a dense planner: why `lib.planner.experts` gives no seconds.

The problem: the planner predicts dense models to a few percent, and a model with experts looks like a dense model of
its active parameters plus all-to-alls. The idea: predict the published runs in this way, and look at the errors.
`python -m book.published.experts` prints them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from book.published import EXPERTS
from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.experts import ExpertShape
from lib.cost.hardware import GPUS
from lib.cost.sizes import ModelShape
from lib.planner.experts import ExpertLayout, ExpertTraining, exchanged_bytes
from lib.planner.report import table
from lib.planner.seconds import step_s
from lib.planner.training import Cluster, Layout4D, Training, stack_for

STACK = "fsdp"  # all rows are of PyTorch FSDP


@dataclass(frozen=True)
class ExpertError:
    """Seconds of a published step, and of its parts as predicted."""

    id: str
    measured_s: float
    dense_s: float  # a dense model of the active parameters
    exchange_s: float  # all-to-alls over the link, then over the network; nothing is hidden

    @property
    def error(self) -> float:
        """0.05: 5 % more seconds than measured."""
        return (self.dense_s + self.exchange_s) / self.measured_s - 1


def dense_twin(shape: ExpertShape) -> ModelShape:
    """A dense model with the active parameters of a mean block: its MLP has those that attention leaves.

    Attention of low rank becomes attention with one head of keys and values, its heads as wide as the mean of keys and
    values, so that both matmuls of the scores take the same number of operations.
    """
    base, latent = shape.base, shape.latent
    if latent:
        width = (latent.d_nope + latent.d_rope + latent.d_value) // 2
        base = replace(base, head_dim=width, num_kv_heads=1)
    active = (shape.num_active_parameters - 2 * shape.end_parameters) / base.num_layers
    left = active - base.d_model * (2 * base.d_q + 2 * base.d_kv)
    return replace(base, d_mlp=round(left / (3 * base.d_model)), biases="none")


def predict_experts(row: Mapping) -> ExpertError:
    """The prediction for a row of `experts.json`."""
    shape, dense = EXPERT_MODELS[row["model"]], dense_twin(EXPERT_MODELS[row["model"]])
    cluster, stack = Cluster(GPUS[row["gpu"]], row["gpus"]), stack_for(STACK, row["gpu"])
    training = Training(replace(dense, context=row["seq"]), cluster, stack, row["global_batch"])
    how = {"rows": row["microbatch"], "zero": row["zero"], "recompute": row["recompute"]}
    layout = Layout4D(row["tp"], 1, row["pp"], row["dp"], stages_per_rank=row["interleave"], **how)
    of = ExpertTraining(shape, replace(training, model=replace(shape.base, context=row["seq"])))
    sent = exchanged_bytes(of, ExpertLayout(row["tp"], row["pp"], row["dp"], row["ep"], **how))
    device, blocks = cluster.device, (shape.base.num_layers - len(shape.dense)) / row["pp"]
    seconds = sent.inside / (device.link_Bps * stack.link_share)
    seconds += sent.across / ((device.network_Bps or 0) * stack.network_share) if sent.across else 0.0
    return ExpertError(row["id"], row["step_s"], step_s(training, layout).total, blocks * seconds)


def expert_errors() -> list[ExpertError]:
    """Of all rows."""
    return [predict_experts(row) for row in json.loads(EXPERTS.read_text(encoding="utf-8"))]


def expert_errors_text(found: list[ExpertError]) -> str:
    """A line for each run, and the range of the errors."""
    rows = [["run", "measured s", "dense s", "all-to-alls s", "error"]]
    for one in found:
        times = (f"{s:.2f}" for s in (one.measured_s, one.dense_s, one.exchange_s))
        rows.append([one.id, *times, f"{one.error:+.1%}"])
    least, most = (of(one.error for one in found) for of in (min, max))
    return f"{table(rows)}\n\n{len(found)} runs: errors from {least:+.0%} to {most:+.0%}"


if __name__ == "__main__":
    print(expert_errors_text(expert_errors()))
