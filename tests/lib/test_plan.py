"""A run is predicted before it starts, and then measured: what it sends, to the byte; what it holds; what it says."""

import dataclasses
import itertools
import json
import os
import sys
from functools import partial

import cloudpickle
import pytest
import torch

from book.trials import wire_audit
from lib import data, run, trace
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig
from lib.parallel import parallelize
from lib.planner import Plan, step_bubble, step_memory, step_traffic
from lib.planner.report import ranks_text
from lib.train import main
from lib.training import loop as train_loop
from lib.training.config import TrainConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
V_SHAPED = (("v-half", 2), ("v-min", 2), ("dualpipe-v", 2))
TINY = GPTConfig(context=8, d_model=16, num_layers=7, num_heads=8)
SMALL = GPTConfig(context=32, d_model=64, num_layers=3, num_heads=8)
LLAMA = {"llama": True, "tied": False, "num_kv_heads": 4, "d_mlp": 104}
BUCKET_BYTES = 20_000


ALL = "CERTIFICATE" in os.environ  # `make certificate` takes all layouts, `make test` some


def places(layout, rank):
    """A rank's coordinate on each axis."""
    return MeshShape(**layout.sizes).coordinates(rank)


def layouts(degrees, zeros, model, microbatches=4, schedules=SCHEDULES, **more):
    """All that a Layout allows."""
    found = []
    for (schedule, per_rank), slices, zero in itertools.product(schedules, (False, True), zeros):
        try:
            layout = Layout(
                *degrees,
                schedule=schedule,
                stages_per_rank=per_rank,
                microbatches=max(microbatches, degrees[1]),
                sequence_parallel=slices,
                zero=zero,
                **more,
            )
            layout.check(model, rows_of(layout))
        except ValueError:
            continue
        found.append(layout)
    return found


def rows_of(layout, each=1):
    return layout.dp * layout.microbatches * each


def on_meshes(world, cells, model, rows, watch, dtype):
    """A step in each layout, or two, the last of them watched; a mesh's process groups are made once."""
    torch.set_num_threads(1)
    meshes, seen, tokens = {}, [], data.load().train
    for layout in cells:
        degrees = tuple(layout.sizes.items())
        if degrees not in meshes:
            meshes[degrees] = Mesh(MeshShape(**layout.sizes), world)
        config = TrainConfig(
            model=model, layout=layout, global_batch=rows_of(layout, rows), bucket_bytes=BUCKET_BYTES
        )
        torch.manual_seed(0)
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        ours = parallelize(GPT(model), meshes[degrees], layout, optimizer, bucket_bytes=BUCKET_BYTES, dtype=dtype)
        if watch == "memory":
            train_loop.train_step(ours, tokens, 0, config)
            with ours.memory() as memory:
                train_loop.train_step(ours, tokens, 1, config)
            seen.append(memory.peak_by_kind)
        else:
            for step in range(2 if watch == "second step" else 1):
                with trace.record(world.rank) as recorded:
                    train_loop.train_step(ours, tokens, step, config)
            seen.append(recorded.traffic())
    return seen


def watched(cells, model, rows, watch, dtype=None, on=on_meshes):
    """(layout, rank, what was seen) of all cells, which have as many ranks each."""
    (n,) = {layout.num_ranks for layout in cells}
    of_ranks = run(on, n, cells, model, rows, watch, dtype, timeout_s=600)
    return [(layout, rank, of_ranks[rank][i]) for i, layout in enumerate(cells) for rank in range(n)]


# ---- what is sent ---------------------------------------------------------------------------------------------------

# Those with data-parallel ranks only come first: zero=3 makes a second group of all ranks.
DEGREES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)],
    8: [(8, 1, 1), (2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 1, 8)],
}


def differences(cells, model=TINY, watch="first step", on=on_meshes):
    found = []
    for layout, rank, seen in watched(cells, model, 1, watch, on=on):
        plan = Plan(model, layout, rows_of(layout), bucket_bytes=BUCKET_BYTES)
        predicted = step_traffic(plan, plan.place(rank), plan.ep_place(rank))
        calls, sent = ({key: each[i] for key, each in seen.items()} for i in range(2))
        if {key: n for key, (n, _) in predicted.items()} != calls or {
            key: n for key, (_, n) in predicted.items()
        } != pytest.approx(sent, rel=1e-12):
            found.append((layout, rank, predicted, seen))
    return found


@pytest.mark.thorough("eight ranks", keep=1)
@pytest.mark.slow("eight ranks on two cores take a step in each of the layouts that they can have")
@pytest.mark.parametrize("n", DEGREES)
def test_every_byte_of_every_kind_on_every_axis_and_rank(n):
    cells = [layout for degrees in DEGREES[n] for layout in layouts(degrees, (0, 1, 2, 3), TINY)]
    cells = cells if ALL else cells[:: {2: 3, 4: 12, 8: 25}.get(n, 1)]  # all in `make certificate`
    if n == 8:
        cells += [Layout(2, 2, 2, order="tp,dp,pp", microbatches=2, sequence_parallel=True, zero=1)]
    assert len(cells) >= 4
    assert not differences(cells)


@pytest.mark.thorough("seconds of several processes")
def test_recomputation_and_grouped_heads_and_an_untied_head():
    grouped = dataclasses.replace(TINY, num_kv_heads=1, tied=False)
    cells = [Layout(1, 1, 2, recompute=how, sequence_parallel=sp) for how in ("selective", "full") for sp in (0, 1)]
    cells += [Layout(1, 2, 1, schedule="zb-h1", microbatches=2), Layout(2, zero=3, microbatches=2, recompute="full")]
    cells += [Layout(1, 2, 1, schedule="zb-v", stages_per_rank=2, microbatches=3, zero=2)]
    assert not differences(cells, grouped)
    assert not differences(cells[1::2], dataclasses.replace(TINY, **LLAMA | {"num_kv_heads": 1}))


@pytest.mark.thorough("seconds of several processes")
def test_a_v_also_one_in_which_some_backwards_are_whole():
    """A whole backward gathers its input again, and a backward in two halves kept it: DualPipe-V has both."""
    assert not differences(layouts((1, 2, 2), (1,), TINY, schedules=V_SHAPED))


def test_the_second_step_sends_what_the_first_did():
    """With zero=2 a weight of two stages of one rank is summed as often, whichever stage ended the last step."""
    cells = [Layout(1, 2, 2, schedule="zb-v", stages_per_rank=2, microbatches=3, zero=1, sequence_parallel=True)]
    cells += [Layout(2, 2, 1, schedule="zb-v", stages_per_rank=2, microbatches=4, zero=2)]
    assert not differences(cells, watch="second step")


# ---- what is held ---------------------------------------------------------------------------------------------------


def off(layout, rank, seen, model=SMALL, rows=2):
    """Kinds of which prediction and measurement differ, and how."""
    corpus = data.load().train.untyped_storage().nbytes()
    plan = Plan(model, layout, rows_of(layout, rows), bucket_bytes=BUCKET_BYTES, corpus_bytes=corpus)
    here = places(layout, rank)
    predicted = step_memory(plan, here["pp"], here["dp"], here["tp"], here.get("cp", 0))
    message = rows * model.context * model.d_model * 4 if layout.tp > 1 else 0  # that gloo's threads may still hold
    exact = "parameter", "optimizer", "gradient"
    found = {kind: (predicted[kind], seen[kind]) for kind in exact if predicted[kind] != seen[kind]}
    for kind, text in (("activation", corpus), ("total", 0)):
        too_low, allowed = seen[kind] - predicted[kind], 0.01 * (seen[kind] - text)
        if not -allowed <= too_low <= max(allowed, 2 * message):
            found[kind] = predicted[kind] - text, seen[kind] - text
    return {(str(layout), rank): found} if found else {}


TWO = [((1, 1, 1), (2,)), ((2, 1, 1), (0, 1, 2)), ((1, 2, 1), (1, 2))]
EIGHT = [((2, 2, 2), (0, 1)), ((4, 2, 1), (0, 1, 2)), ((1, 4, 2), (0,)), ((2, 1, 4), (0, 1)), ((8, 1, 1), (0, 1, 2))]
LONG = (pytest.mark.skipif(not ALL, reason="make certificate runs it"), pytest.mark.timeout(300))


@pytest.mark.thorough("a watched step looks at all tensors", keep=1)
@pytest.mark.slow("a watched step looks at all tensors after each operation")
@pytest.mark.parametrize(
    ("degrees", "zeros", "schedules"),
    [
        ((1, 1, 1), (0, 1), SCHEDULES),
        ((1, 1, 2), (0,), SCHEDULES),
        ((1, 2, 1), (0,), SCHEDULES),
        ((1, 2, 2), (0,), SCHEDULES[::3]),
        ((1, 2, 2), (0,), V_SHAPED[::2]),
        ((2, 1, 2), (1,), SCHEDULES[:1]),
        *(pytest.param(degrees, zeros, SCHEDULES, marks=LONG) for degrees, zeros in [*TWO, *EIGHT]),
    ],
)
def test_the_peak_of_a_step_on_every_rank(degrees, zeros, schedules):
    order = "tp,dp,pp" if degrees[0] > 1 else "dp,pp,tp"  # shards of what dp × tp ranks sum are in this order
    assert not wrong_peaks(SMALL, layouts(degrees, zeros, SMALL, schedules=schedules, order=order))


def test_the_peak_where_weight_gradients_of_row_layers_wait():
    """Until then I keeps the input of the layer and the gathered gradient of its output.

    So many blocks that both are more bytes than the messages that `off` allows.
    """
    model = dataclasses.replace(SMALL, num_layers=5)
    cells = [
        Layout(1, 2, 2, schedule=schedule, stages_per_rank=per_rank, microbatches=2, sequence_parallel=True)
        for schedule, per_rank in (("zb-h1", 1), ("zb-v", 2))
    ]
    assert not wrong_peaks(model, cells)


def wrong_peaks(model, cells, tries=3, on=on_meshes):
    """What differs in each of the tries: rarely, a thread of gloo holds the tensors of a finished sum for longer."""
    found = {}
    for _ in range(tries):
        every = watched(cells, model, 2, "memory", on=on)
        found = {key: one for seen in every for key, one in off(*seen, model).items()}
        cells = [layout for layout in cells if any(key[0] == str(layout) for key in found)]
        if not cells:
            break
    return found


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.slow("a watched step looks at all tensors after each operation")
@pytest.mark.parametrize("n", [1, 2])
def test_the_peak_of_a_step_with_master_weights(n):
    """Few tokens, so that it is in the optimizer's step: the gradients of one bucket in float32."""
    model = dataclasses.replace(SMALL, context=4, num_layers=2)
    cells = (
        [Layout(n, zero=1), Layout(n, zero=2)]
        if n == 1
        else [Layout(2, zero=1), Layout(1, 2, zero=1, microbatches=2)]
    )
    corpus = data.load().train.untyped_storage().nbytes()
    for layout, rank, seen in watched(cells, model, 1, "memory", torch.bfloat16):
        plan = Plan(model, layout, rows_of(layout), 2, 4, BUCKET_BYTES, corpus)
        here = places(layout, rank)
        predicted = step_memory(plan, here["pp"], here["dp"], here["tp"])
        for kind in ("parameter", "gradient", "optimizer"):
            assert predicted[kind] == seen[kind], (layout, rank, kind)
        assert predicted["total"] == pytest.approx(seen["total"], rel=1e-3), (layout, rank)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.slow("a watched step looks at all tensors after each operation")
@pytest.mark.parametrize(
    ("degrees", "zeros", "schedules"),
    [
        ((1, 1, 1), (0, 1, 2), SCHEDULES),
        ((1, 1, 2), (0,), SCHEDULES),
        ((1, 2, 1), (0,), SCHEDULES[::3]),
        *(pytest.param(degrees, zeros, SCHEDULES, marks=LONG) for degrees, zeros in EIGHT[:1]),
    ],
)
def test_the_peak_of_a_step_of_a_llama(degrees, zeros, schedules):
    model = dataclasses.replace(SMALL, **LLAMA)
    assert not wrong_peaks(model, layouts(degrees, zeros, model, schedules=schedules))


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_equal_stages_have_the_closed_forms_bubble():
    plan = Plan(TINY, Layout(pp=4, microbatches=8), 8)
    bubble, equal = step_bubble(plan)
    assert equal == pytest.approx(3 / 11) and bubble > equal


def test_a_simulated_backward_takes_what_it_recomputes():
    """Two forwards; with its blocks once more three, and less on the stage whose head is not recomputed."""
    d, scores = TINY.d_model, 2 * TINY.context * TINY.d_model
    for how, again in {"none": 0, "selective": scores, "full": 12 * d * d + scores}.items():
        plan, times = Plan(TINY, Layout(pp=2, microbatches=2, recompute=how), 2), {}
        for slot in plan.timeline.compute:
            times[slot.action.stage, slot.action.op.name] = slot.end - slot.start
        for stage, head in ((0, 0), (1, 1)):
            forward = times[stage, "F"]
            assert times[stage, "B"] == pytest.approx(2 * forward + again * (len(plan.layers[stage]) - head))
            assert (times[stage, "B"] == pytest.approx(3 * forward)) == (how == "full" and not head)


PICTURE = """\
8 ranks = dp 2 x pp 2 x tp 2 (neighbours on the last axis have consecutive numbers)
dp 2: 8 of 16 sequences each, in 4 microbatches of 2; zero 0
pp 2: 2 stages, schedule 1F1B
tp 2: 2 of 4 heads, 128 of 256 vocabulary entries, 32 of 64 tokens between the layers

ranks        layers       Ψ  m kept  parameters  gradients  optimizer  activations  total MB
0-1, 4-5  embed 0-1  62,656       2       0.251      0.283      0.501        1.726     2.728
2-3, 6-7   2-3 head  58,688       1       0.235      0.268      0.470        1.325     2.264
highest on ranks 0-1, 4-5: 0.401 MB more activations than on ranks 2-3, 6-7, 2 microbatches in
  flight instead of 1

sent by a rank in a step     calls              MB  nodes
all_gather tp             52 to 56  0.852 to 0.918  inside a node
all_reduce dp                    2           0.198  out of a node: 0.794 MB
all_reduce dp×pp                 1           0.049  out of a node: 0.098 MB
all_reduce dp×tp                 1  0.005 to 0.029  out of a node: 0.035 MB
all_reduce pp×tp                 1           0.000  inside a node
all_reduce tp               0 to 8  0.000 to 0.006  inside a node
broadcast pp                     1           0.000  inside a node
reduce_scatter tp               36           0.590  inside a node
send pp                          4           0.066  inside a node

bubble: 23.1% of all ranks' time (were all stages equal, 20.0%)
rank 0  F0 F1 ·  ·  B0--- F2 ·  B1--- F3 B2--- ·  ·  B3---
rank 1  ·  F0 B0--- F1--- B1--- F2 B2--- F3 B3------
"""


def test_the_plan_as_a_picture(capsys, monkeypatch):
    for name in ("train", "run", "init"):
        monkeypatch.setattr(f"lib.train.{name}", lambda *_: pytest.fail("a plan starts nothing"))
    flags = "--plan --dp 2 --pp 2 --tp 2 --num-layers 4 --microbatches 4 --sequence-parallel --ranks-per-node 4"
    main(flags.split())
    assert capsys.readouterr().out == PICTURE


def test_a_plan_for_more_ranks_than_there_are(capsys):
    main("--plan --dp 8 --pp 16 --tp 8 --num-layers 31 --num-heads 8 --microbatches 16 --global-batch 128".split())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1024 ranks = ") and len(lines) <= 42 and max(map(len, lines)) <= 100


def test_it_says_what_it_leaves_out(capsys):
    main("--plan --dp 2 --zero 3 --recompute full --dropout 0.1".split())
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not exact: ")]
    assert [line.split()[2] for line in said] == ["zero=3", "recompute=full", "dropout"]


def test_zero_3_has_one_bucket_for_each_block():
    """However small the buckets of the other stages are; embedding and head come first."""
    plan = Plan(TINY, Layout(2, zero=3), 4, bucket_bytes=100)
    blocks = [
        {weight.name.rpartition("blocks.")[2].split(".")[0] for weight in one.weights} for one in plan.buckets(0)
    ]
    assert blocks[0] >= {"embed"} and blocks[1:] == [{str(i)} for i in range(TINY.num_layers)]
    assert len(Plan(TINY, Layout(2, zero=2), 4, bucket_bytes=100).buckets(0)) > len(blocks)


def test_ranks_in_words():
    assert ranks_text([0, 1, 2, 5]) == "0-2, 5" and ranks_text([0, 2, 4]) == "0, … (3)"


# ---- beside what was measured ----------------------------------------------------------------------------------------


def test_a_profile_has_all_ranks_predicted_beside_measured(tmp_path, capsys):
    file = tmp_path / "step.json"
    flags = "--dp 2 --pp 2 --schedule zb-h1 --microbatches 4 --steps 3 --validate-every 0 --context 16 --d-model 32"
    main([*flags.split(), "--profile", str(file)])
    assert f"open {file} at https://ui.perfetto.dev to see step 3 of all ranks" in capsys.readouterr().out
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [(e["pid"], lanes[e["pid"], e["tid"]], e) for e in events if e["ph"] == "X"]
    schedule = Layout(2, 2, schedule="zb-h1", microbatches=4).make_schedule()
    for rank in range(4):
        for lane in ("compute", "predicted"):
            names = [e["name"] for pid, where, e in slices if (pid, where) == (rank, lane)]
            assert {str(action) for action in schedule.actions[rank % 2]} <= set(names)
        assert any(where.startswith("network") for pid, where, _ in slices if pid == rank)
    sent = [e["args"] for _, where, e in slices if where.startswith("network")]
    assert sent and all(args["axis"] in ("dp", "pp", "dp×pp") and args["wire_bytes"] >= 0 for args in sent)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for *_, e in slices)


# ---- on the wire ----------------------------------------------------------------------------------------------------

LARGE = GPTConfig(context=128, d_model=256, num_layers=3, num_heads=4)
AUDITED = Layout(2, 2, 2, microbatches=2, sequence_parallel=True)


def audited_step(world):
    torch.set_num_threads(1)
    config = TrainConfig(model=LARGE, layout=AUDITED, global_batch=16)
    model, tokens = train_loop.build(world, config), data.load().train
    return partial(train_loop.train_step, model, tokens, 0, config)


@pytest.mark.thorough("eight ranks, and the kernel counts")
@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(not wire_audit.available(), reason=wire_audit.ELSEWHERE)
def test_a_whole_step_on_the_wire(say):
    """Counted is sent: the sum of all axes, for each rank, by the kernel's own count."""
    plan = Plan(LARGE, AUDITED, 16)
    of_places = [sum(sent for _, sent in step_traffic(plan, place).values()) for place in range(2)]
    predicted = 2 * [of_places[place] for place in (0, 0, 1, 1)]  # of each replica: two stages, of two ranks each
    sent = wire_audit.sent_in_a_step(audited_step, 8)
    for what, of_ranks in ("predicted", predicted), ("on the wire", sent):
        say(f"MB of the ranks of 2 x 2 x 2, {what}: {', '.join(f'{x / 1e6:.3f}' for x in of_ranks)}")
    assert sent == pytest.approx(predicted, rel=0.002) and all(a > b for a, b in zip(sent, predicted, strict=True))


class WithExperts(Layout):
    """As a layout is while somebody adds an axis to it."""

    @property
    def sizes(self):
        return super().sizes | {"ep": 2}


def test_an_axis_that_a_plan_does_not_know_is_refused():
    with pytest.raises(
        ValueError, match="a plan knows what ranks along dp, pp, cp, tp hold and send, and nothing of ep=2"
    ):
        Plan(SMALL, WithExperts(dp=2), 2)
