"""*Will it fit?* in a browser: its formulas and configs against `lib.planner`, its fields, its state in the address.

It needs no built book: the scripts and their numbers are put into a blank page.
"""

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from book.explain.configs import shape_of
from lib.cost.adapters import BASES, Adapters
from lib.cost.hardware import Device
from lib.cost.models import known
from lib.cost.sizes import (
    BIASES,
    OPTIMIZERS,
    PLANNED_RECOMPUTE,
    ModelShape,
    Recipe,
    heads_of_rank,
    recipe_of_optimizer,
    shares_heads,
)
from lib.layout import ATTENTION, divisors
from lib.planner import Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.evidence import evidence_of, percent, read_evidence
from lib.planner.margin import HEADROOM, ran_text, verdict_text
from lib.planner.messages import LINK_STEP_S, NETWORK_STEP_S
from lib.planner.refusals import refusal
from lib.planner.report import report_of_layout
from lib.planner.search import ALL_OPEN, all_layouts, lacking, layouts_by_memory, why_slower
from lib.planner.seconds import step_and_waits
from lib.planner.sweep import SWEPT, sweep
from lib.planner.training import GPUS, PRESET_MODELS, STACKS, stack_for
from tests.book.book_project import BOOK, build, live_html, load, soup, violations
from tests.book.test_explain import BAD_CONFIGS, LLAMA8, MODELS
from tests.book.test_explain_models import COUNTED

extension = load("book_planner")
NUMBERS = extension.numbers()
EVERYTHING = replace(ALL_OPEN, zero=(0, 1, 2, 3), every=(1,), loss_chunks=(1,))
HEADS = "num_attention_heads", "num_key_value_heads"
OPEN = "limits.choices.all"


@pytest.fixture(scope="module")
def page(browser):
    """A blank page with the formulas in it, and with the reader of configs."""
    page = browser.new_page()
    for script in extension.SCRIPTS[:-1]:
        page.add_script_tag(path=BOOK / "static" / script)
    return page


def some_model(rng: random.Random) -> ModelShape:
    """A preset, or any sizes; with a sequence of any length."""
    context = rng.choice((1024, 2048, 4096, 6000, 8192, 32_768, 65_537, 131_072))
    if rng.random() < 0.5:
        return replace(rng.choice(list(PRESET_MODELS.values())), context=context)
    heads = rng.choice((8, 12, 16, 40, 64, 96))
    return ModelShape(
        heads * rng.choice((64, 80, 128)),
        rng.choice((6, 12, 24, 30, 32, 62, 105)),
        heads,
        rng.choice((32_000, 50_257, 128_256)),
        context,
        num_kv_heads=rng.choice([None, *(n for n in (1, 2, 4, 8) if heads % n == 0)]),
        d_mlp=rng.choice((None, 11_008, 14_336)),
        head_dim=rng.choice((None, None, 96, 256)),
        gated=rng.random() < 0.5,
        biases=rng.choice(BIASES),
        rms_norm=rng.random() < 0.5,
        rotary=rng.random() < 0.5,
        dropout_masks=rng.random() < 0.5,
        tied=rng.random() < 0.5,
    )


def some_training(rng: random.Random, gpus: int) -> Training:
    gpu = rng.choice(list(NUMBERS["gpus"]))
    stack = stack_for(rng.choice(list(STACKS)), gpu)
    if rng.random() < 0.2:
        stack = replace(stack, recipe=Recipe(4, 4, 0, 8), half_width=200.0, usable_share=0.9, fused_swiglu=False)
    if rng.random() < 0.3:
        stack = replace(stack, whole_gradient_bytes=rng.choice((2, 4)), splits_vocabulary=rng.random() < 0.5)
    if rng.random() < 0.3:
        stack = replace(stack, keeps_gathered=True, exposed_cp=0.5)
    speeds = (rng.uniform(1e9, 1e12) for _ in range(3))
    card = Device(rng.uniform(16e9, 300e9), rng.uniform(1e14, 5e15), *speeds, None, "typed")
    cluster = Cluster(rng.choice((GPUS[gpu], card)), gpus, rng.choice((1, 4, 8, 8, 8, 72)))
    return Training(some_model(rng), cluster, stack, rng.choice((96, 512, 1000, 1024, 4096)))


def some_layout(rng: random.Random) -> Layout4D:
    tp, cp, dp = rng.choice((1, 2, 4, 8, 16)), rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3, 8, 64))
    return Layout4D(
        tp,
        cp,
        rng.choice((1, 2, 3, 4, 8, 16)),
        dp,
        rng.choice((1, 2, 4, 8)),
        rng.choice((1, 1, 2, 5, 7, 16)),
        rng.choice((0, 1, 2, 3)),
        tp > 1 and rng.random() < 0.7,
        rng.choice(PLANNED_RECOMPUTE),
        rng.choice(("1f1b", "1f1b", "zb-h1", "zb-v")),
        rng.choice(divisors(dp * cp)),
        rng.choice((1, 2, 3)),
        rng.choice((1, 1, 8)),
        rng.choice(("", "", *ATTENTION)),
    )


def ask(page, what: str, trainings: list, layouts: list | None = None) -> list:
    """What the script says of each training (and layout): `what` is an expression of `of`, its planner, and `layout`.

    As text, because playwright is slow at turning large objects into JavaScript.
    """
    plain = {
        "trainings": [extension.plain_training(one) for one in trainings],
        "layouts": [one._asdict() for one in layouts or []],
        "limits": NUMBERS["limits"],
    }
    script = f"""text => {{
        const {{ trainings, layouts, limits }} = JSON.parse(text);
        const say = (of, layout) => ({what});
        return JSON.stringify(trainings.map((training, i) => say(planner(training, limits), layouts[i])));
    }}"""
    return json.loads(page.evaluate(script, json.dumps(plain)))


def differences(said: dict, kinds) -> list[float]:
    """Of each kind, as a fraction of the whole: a kind may be a small difference of two large numbers."""
    whole = sum(kinds)
    assert set(said) == set(kinds._fields)
    return [abs(said[name] - value) / whole for name, value in kinds._asdict().items()]


def test_seconds_and_bytes_of_a_thousand_random_layouts(page, say):
    rng = random.Random(0)
    layouts = [some_layout(rng) for _ in range(1000)]
    runs = [some_training(rng, layout.gpus) for layout in layouts]
    what = """{...of.planned(layout), verdict: [of.verdictText(layout, "here"), of.ranText(of.planned(layout).bytes)],
        answers: of.answers(of.planned(layout), 15e12, 2.5), room: of.room,
        parameters: of.parameters}"""
    worst = 0.0
    for said, run, layout in zip(ask(page, what, runs, layouts), runs, layouts, strict=True):
        time, held = step_s(run, layout), memory_bytes(run, layout)
        found = differences(said["seconds"], time) + differences(said["memory"], held)
        found += [abs(said["stepS"] / time.total - 1), abs(said["bytes"] / held.total - 1)]
        answers = report_of_layout(run, layout, 15e12, 2.5).answers
        assert said["answers"].keys() == answers.keys() and said["parameters"] == run.model.num_parameters
        found += [abs(said["answers"][name] / value - 1) for name, value in answers.items()]
        assert max(found) < 1e-9, (run, layout)
        named = re.sub(
            r" bytes per parameter( \([\w-]+\))?", " bytes per parameter (here)", verdict_text(run, layout)
        )
        assert said["verdict"] == [named, ran_text(held.total, run.room_bytes)]
        assert math.isclose(said["room"], run.cluster.device.memory_bytes * run.stack.usable_share)
        worst = max(worst, *found)
    say(f"planner.js and lib.planner differ by {worst:.1e} at most")


def parted(wait) -> dict[str, float]:
    """A wait of Python in one dictionary, as the script's."""
    return wait.messages._asdict() | {
        "beside_s": wait.beside_s,
        "hidden_s": wait.hidden_s,
        "exposed_s": wait.exposed_s,
    }


def test_messages_of_each_axis_and_what_hides_of_them(page, say):
    """Their bytes, seconds and latency, and how many computation hides: on slow wires, and on thousands of GPUs."""
    rng, seen, most = random.Random(5), Counter(), 0
    layouts = [some_layout(rng) for _ in range(700)]
    layouts = [one._replace(dp=one.dp * rng.choice((1, 1, 64, 512)), replicas=1) for one in layouts]
    layouts += [one._replace(zero=3, cp=1, replicas=rng.choice(divisors(one.dp))) for one in layouts[:100]]
    layouts = [one for one in layouts if one.gpus <= 2**20]  # all that the page takes
    runs = [some_training(rng, layout.gpus) for layout in layouts]
    runs = [changed(run, rng) for run in runs]
    what = """Object.fromEntries(Object.entries(of.planned(layout).waits).map(([axis, { messages, ...wait }]) =>
        [axis, { ...messages, ...wait, exposed_s: messages.seconds - wait.hidden_s }]))"""
    for said, run, layout in zip(ask(page, what, runs, layouts), runs, layouts, strict=True):
        seconds, ours = step_and_waits(run, layout)
        assert list(said) == list(ours) == ["tp", "cp", "pp", "dp"]
        for axis, wait in ours.items():
            whole = max(wait.messages.seconds, wait.beside_s)
            assert said[axis].keys() == parted(wait).keys()
            for name, value in parted(wait).items():
                wrong = abs(said[axis][name] - value) > 1e-9 * (value if name in ("bytes", "latency_s") else whole)
                assert not wrong, (axis, name, said[axis][name], value, run, layout)
            seen[axis, "hides in part"] += 0 < wait.hidden_s < wait.messages.seconds * (1 - 1e-9)
            seen[axis, "latency"] += wait.messages.latency_s > 0.5 * wait.messages.seconds
        most = max(most, layout.gpus)
    assert min(seen[axis, "hides in part"] for axis in ours) > 50 and seen["dp", "latency"] > 20 and most > 100_000
    say(f"on up to {most:,} GPUs; axes of which a part hides, and those that are half latency: {dict(seen)}")


def changed(run: Training, rng: random.Random) -> Training:
    """The same with wires of 1/256 to 4 times the speed, a link to each peer, or FP8; and a larger batch."""
    rates = {
        name: getattr(run.cluster.device, name) * 2 ** rng.uniform(-8, 2) for name in ("link_Bps", "network_Bps")
    }
    device = replace(run.cluster.device, **rates, peers=rng.choice((0, 7)))
    stack = replace(run.stack, fp8_speedup=rng.choice((1.0, 1.5)))
    return replace(run, cluster=replace(run.cluster, device=device), stack=stack, global_batch=64 * run.global_batch)


def partly_trained(rng: random.Random, run: Training) -> Training:
    """The same with adapters, another optimizer, or something offloaded."""
    optimizer = rng.choice(list(OPTIMIZERS))
    stack = replace(run.stack, recipe=recipe_of_optimizer(run.stack.recipe, optimizer))
    adapters = rng.choice((None, Adapters(rng.choice((1, 16, 64)), rng.choice(list(BASES)))))
    stack = run.stack if optimizer == "adam" else stack
    return replace(
        run,
        stack=stack,
        optimizer=optimizer,
        adapters=adapters,
        offload=rng.choice(("", "", "optimizer", "parameters")),
    )


def test_bytes_of_adapters_optimizers_and_offload(page):
    rng = random.Random(5)
    layouts = [some_layout(rng) for _ in range(400)]
    runs = [partly_trained(rng, some_training(rng, layout.gpus)) for layout in layouts]
    what = "{...of.planned(layout), verdict: of.verdictText(layout, 'here'), why: of.noSeconds}"
    for said, run, layout in zip(ask(page, what, runs, layouts), runs, layouts, strict=True):
        assert max(differences(said["memory"], memory_bytes(run, layout))) < 1e-9, (run, layout)
        words = verdict_text(run, layout)
        if run.optimizer == "adam":
            words = re.sub(r" bytes per parameter( \([\w-]+\))?", " bytes per parameter (here)", words)
        assert said["verdict"] == words and said["why"] == run.no_seconds
        assert (said["stepS"] is None) == bool(run.no_seconds) == (said["seconds"] == {})


def test_layouts_without_seconds_are_those_of_python(page):
    rng = random.Random(6)
    runs = [replace(page_training(rng), adapters=Adapters(16, rng.choice(list(BASES)))) for _ in range(12)]
    runs += [replace(page_training(rng), offload=rng.choice(("optimizer", "parameters"))) for _ in range(8)]
    answered = 0
    for run, said in zip(runs, ask(page, "of.leastSplit(undefined, 5)", runs), strict=True):
        ours = tried(layouts_by_memory, run, None, 5)
        if isinstance(ours, str):
            assert said["found"] == []
            continue
        answered += 1
        assert [one["layout"] for one in said["found"]] == [layout._asdict() for layout, _ in ours]
    assert answered > 8


def tried(read, *args):
    try:
        return read(*args)
    except ValueError as error:
        return str(error)


def page_training(rng: random.Random) -> Training:
    """One that can be chosen on the page, and some that cannot."""
    return some_training(rng, rng.choice((8, 16, 24, 64, 256, 1024)))


def test_it_refuses_what_the_search_leaves_out(page):
    rng = random.Random(1)
    for run in (page_training(rng) for _ in range(25)):
        possible = set(all_layouts(run, EVERYTHING))
        drawn = []
        for layout in [*rng.sample(sorted(possible), min(20, len(possible))), *(some_layout(rng) for _ in range(40))]:
            ranks = layout.tp * layout.cp * layout.pp
            dp = max(1, run.cluster.gpus // ranks)
            copies = layout.replicas if rng.random() < 0.5 else dp * layout.cp * layout.tp // run.cluster.per_node
            sliced = layout._replace(dp=dp, sequence_parallel=layout.tp > 1, replicas=max(1, copies))
            if layout.recompute != "selective":
                drawn.append(sliced._replace(every=1, loss_chunks=1))
        said = ask(page, "of.refusal(layout)", [run] * len(drawn), drawn)
        for layout, words in zip(drawn, said, strict=True):
            assert words == refusal(run, layout), (run, layout)
            named = layout.attention != "ulysses" or shares_heads(*heads_of_rank(run.model, layout.tp), layout.cp)
            can = layout._replace(attention="") in possible and (not layout.attention or (layout.cp > 1 and named))
            assert (words is None) == can, (run, layout, words)
            assert words is None or ("choose" in words and words.endswith(".") and "undefined" not in words)


def test_the_best_three_are_those_of_the_search(page):
    rng = random.Random(2)
    runs = [page_training(rng) for _ in range(28)]
    said_of = [*ask(page, f"of.best({OPEN})", runs[:4]), *ask(page, "of.best()", runs[4:])]
    for i, (run, said) in enumerate(zip(runs, said_of, strict=True)):
        try:
            best = best_layouts(run, ALL_OPEN if i < 4 else None)
        except ValueError:
            assert said["found"] == []
            continue
        assert [one["layout"] for one in said["found"]] == [one.layout._asdict() for one in best]
        for theirs, ours in zip(said["found"], best, strict=True):
            assert math.isclose(theirs["stepS"], ours.seconds.total, rel_tol=1e-9)
            assert math.isclose(theirs["bytes"], ours.memory.total, rel_tol=1e-9)


def test_where_nothing_fits_it_says_what_python_says(page):
    rng = random.Random(4)
    runs = [page_training(rng) for _ in range(60)]
    runs = [run for run in runs if run.model.num_parameters > 6e10 * rng.random() * run.cluster.gpus / 8]
    for name, gpus in ("llama-70b", 24), ("llama-405b", 8), ("llama-70b", 4), ("llama3-8b", 1), ("qwen3-32b", 3):
        of = PRESET_MODELS[name], Cluster(GPUS["h100"], gpus), stack_for("megatron", "h100"), 1024
        runs.append(Training(*of))
    words = f"(({{ found, smallest }}) => found.length ? null : of.nothing({OPEN}, smallest))(of.best({OPEN}))"
    found = set()
    for run, said in zip(runs, ask(page, words, runs), strict=True):
        ours = tried(best_layouts, run, ALL_OPEN)
        assert said == (ours if isinstance(ours, str) else None), run
        found |= {said.partition(" ")[0], *re.findall("GPUs of|GPUs|sequences|tokens$", said)} if said else set()
    assert found >= {"nothing", "the", "GPUs", "GPUs of", "sequences"}, found


def test_a_lack_is_the_one_of_python(page):
    rng = random.Random(7)
    runs = [replace(page_training(rng), global_batch=rng.choice((16, 32, 64))) for _ in range(16)]
    words = """(({ found, choices }) =>
        found.length && choices === of.usual ? of.lacking(found[0]) : null)(of.recommended())"""
    found = 0
    for run, said in zip(runs, ask(page, words, runs), strict=True):
        ours = tried(best_layouts, run)
        lack = None if isinstance(ours, str) else lacking(run, ours[0], HEADROOM)
        assert (said and (said["parts"], said["one"]["layout"])) == (lack and (lack[0], lack[1].layout._asdict())), (
            run
        )
        found += bool(lack)
    assert 1 < found < 14


@pytest.mark.parametrize("what", SWEPT)
def test_a_sweep_is_the_one_of_python(page, what):
    rng, reasons = random.Random(SWEPT.index(what)), 0
    runs = [page_training(rng) for _ in range(6)]
    runs = [replace(run, cluster=replace(run.cluster, gpus=min(64, run.cluster.gpus))) for run in runs]
    for run in runs:
        network = rng.choice((1, 8)) * 1e9
        device = replace(run.cluster.device, network_Bps=network)
        run = replace(run, cluster=replace(run.cluster, device=device))
        (said,) = ask(page, f"plannerSweep(of.training, limits).sweep('{what}')", [run])
        ours = tried(sweep, run, what)
        if isinstance(ours, str):
            assert said == ours
            continue
        for theirs, row in zip(said, ours, strict=True):
            assert math.isclose(theirs["value"], row.value) and theirs["nothing"] == row.nothing
            assert theirs["reason"] == row.reason
            assert (theirs.get("planned") or {}).get("layout") == (row.planned and row.planned.layout._asdict())
            reasons += bool(row.reason)
    assert reasons > 2


def test_why_the_next_one_is_slower(page):
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 1024)
    best = best_layouts(run)
    said = ask(
        page, "of.whySlower(of.best().found[0], of.planned(layout))", [run] * 2, [one.layout for one in best[1:]]
    )
    for theirs, ours in zip(said, best[1:], strict=True):
        words = f"{theirs['fraction']:.1%} slower: {theirs['extraS']:.3g} s more for {theirs['kind']}"
        assert words == why_slower(best[0], ours)


def with_changes(rng: random.Random, run: Training) -> Training:
    """The same with figures of a card, the states of an optimizer, or whole gradients, as the form may change them."""
    device = run.cluster.device
    figures = {"peak_flops": 1e15, "memory_Bps": 3e12, "link_Bps": 64e9, "memory_bytes": 96e9, "network_Bps": 5e9}
    name = rng.choice([*figures, "card", "recipe", "whole"])
    if name in figures:
        device = replace(device, **{name: figures[name]})
    elif name == "card":  # the constants stay those of the GPU that was chosen
        device = rng.choice(list(GPUS.values()))
    stack = run.stack
    if name == "recipe":
        stack = replace(stack, recipe=recipe_of_optimizer(stack.recipe, rng.choice(list(OPTIMIZERS))))
    if name == "whole":
        stack = replace(stack, whole_gradient_bytes=rng.choice((0, 2, 4)))
    return replace(run, cluster=replace(run.cluster, device=device), stack=stack)


def test_errors_are_those_of_the_command(page):
    """The words behind ± of each stack on each GPU, and of cards and stacks that differ from the table."""
    rng, model = random.Random(8), PRESET_MODELS["llama-13b"]
    runs = [
        Training(model, Cluster(GPUS[gpu], 16), stack_for(name, gpu), 256)
        for gpu in NUMBERS["gpus"]
        for name in STACKS
    ]
    runs += [with_changes(rng, rng.choice(runs)) for _ in range(300)]
    script = """text => {
        const { trainings, ...numbers } = JSON.parse(text);
        return JSON.stringify(trainings.map((training) => errorsOf(training, numbers)));
    }"""
    needed = {name: NUMBERS[name] for name in ("errors", "stacks", "evidence")}
    plain = [extension.plain_training(run) for run in runs]
    kinds = Counter()
    for run, said in zip(
        runs, json.loads(page.evaluate(script, json.dumps(needed | {"trainings": plain}))), strict=True
    ):
        ours = {quantity: str(evidence) for quantity, evidence in evidence_of(run).items()}
        assert said == ours, run
        kinds.update(
            re.findall("±|with these figures|on this card|exactly these constants|with the stack", str(ours))
        )
    assert len(kinds) == 5 and min(kinds.values()) > 20, kinds
    assert {name.partition(", ")[2] for name in read_evidence()} <= {*NUMBERS["gpus"]}, "their stacks are in the page"


def errors_shown(page) -> list[str]:
    return page.locator(".errors small").all_inner_texts() if page.is_visible(".errors") else []


def test_each_answer_has_its_error(page_at):
    """Below the bars, as behind the numbers of the command: of both, of the memory alone, or that it is unknown."""
    page = page_at("?model=llama-13b&gpu=a100&gpus=16&batch=256&stack=aleph-alpha&tp=2&pp=2&b=1")
    run = Training(PRESET_MODELS["llama-13b"], Cluster(GPUS["a100"], 16), stack_for("aleph-alpha", "a100"), 256)
    layout = Layout4D(2, 1, 2, 4, sequence_parallel=True)
    held, time, errors = memory_bytes(run, layout).total, step_s(run, layout).total, evidence_of(run)
    both = [f"{held / 1e9:.1f} GB{errors['memory']}.", f"{time:#.3g} s{errors['seconds']}."]
    assert errors_shown(page) == both and "±" in both[1]
    page.click(".card summary")
    typed(page, peak=300)
    assert [
        ": the error is unknown: no published run on a GPU with these figures." in one for one in errors_shown(page)
    ] == [
        True,
        True,
    ]
    page.select_option("[name=gpu]", "h100")
    page.select_option("[name=gpu]", "a100")
    assert errors_shown(page) == both
    page.select_option("[name=trained]", "16bit")
    assert len(errors_shown(page)) == 1 and str(errors["memory"]) in errors_shown(page)[0], "there are no seconds"
    page.check("input[name=tp][value='16']")
    assert verdict(page).startswith("Impossible.") and errors_shown(page) == []
    page.select_option("[name=model]", "mixtral-8x7b")
    assert errors_shown(page) == []


# ---- configs --------------------------------------------------------------------------------------------------------

READ = """([foreign, presets, texts]) => texts.map(([said, tokens]) => {
    const config = modelConfig(foreign, presets);
    const tried = (what) => { try { return what(); } catch ({ message }) { return message; } };
    const [once, again] = [(text) => tried(() => config.read(text, tokens)), tried(() => config.shortened(said))];
    return { long: once(said), short: once(again), text: again, known: tried(() => config.known(said)) };
})"""


def read_in_page(page, *texts: tuple[str, int | None]) -> list[dict]:
    return page.evaluate(READ, [NUMBERS["foreign"], list(NUMBERS["models"]), texts])


def some_config(rng: random.Random) -> dict:
    """A real one, with keys that are odd, missing or wrong."""
    config = dict(rng.choice([given for given, _ in MODELS.values()] + [one["config"] for one in COUNTED.values()]))
    values = (
        None,
        True,
        False,
        0,
        1,
        7,
        64,
        0.1,
        "none",
        "8",
        [],
        ["full_attention"],
        ["full_attention", "x"],
        {"a": 1},
    )
    keys = [
        *config,
        "attention_bias",
        "mlp_bias",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "warp",
        "n_ctx",
    ]
    keys += [
        "vision_config",
        "quantization_config",
        "resid_pdrop",
        "Sliding-Window",
        "num_experts",
        "tie_word_embeddings",
    ]
    keys += ["use_bias", "use_qkv_bias", "kv_lora_rank", "moe_layers", "n_expert", "num_bits", "use_parallel_block"]
    for key in rng.sample(keys, 2):
        config[key] = rng.choice(values)
    if rng.random() < 0.3:
        config.pop(rng.choice(keys), None)
    return config


def test_a_config_is_read_as_python_reads_it(page):
    rng = random.Random(3)
    configs = [given for given, _ in MODELS.values()] + [some_config(rng) for _ in range(400)]
    configs += [one["config"] for one in COUNTED.values()]
    configs += [json.loads(text) for text, _ in BAD_CONFIGS.values() if text.startswith("{") and len(text) > 1]
    window = {"sliding_window": 4096, "use_sliding_window": False}
    configs += [LLAMA8 | {"attention_bias": True, "mlp_bias": one} for one in ([], {}, 0, True)] + [LLAMA8 | window]
    cases = [(json.dumps(one), rng.choice((None, 4096, 131_072))) for one in configs]
    answered = 0
    for (text, tokens), said in zip(cases, read_in_page(page, *cases), strict=True):
        ours = tried(shape_of, json.loads(text), tokens)
        if not isinstance(ours, str):
            ours, answered = {"model": extension.plain_model(ours[0]), "notes": ours[1]}, answered + 1
            assert len(said["text"]) <= len(text) and said["short"] == said["long"], text
        assert json.dumps(said["long"]) == re.sub(r"(\d)\.0\b", r"\1", json.dumps(ours)), text
    assert 100 < answered < 400


def test_a_name_is_known_as_python_knows_it(page):
    names = "Qwen/Qwen3-32B llama3-70b mixtral-8x7b deepseek-v3 Llama-4-Scout llama3-8b-fp8 qwen3-30b-a3b falcon-40b"
    for name, said in zip(names.split(), read_in_page(page, *((name, None) for name in names.split())), strict=True):
        ours = tried(known, name, PRESET_MODELS, "model", "paste its config.json")
        assert said["known"] == ours.partition("; or did you")[0]


# ---- the page -------------------------------------------------------------------------------------------------------


STYLE = (BOOK / "static" / "book.css").read_text(encoding="utf-8")
CLIPBOARD = """Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => {
    window.copied = text;
} } });"""


@pytest.fixture
def page_at(opened):
    """The page with its controls, at an address."""

    def open_at(address: str = "", width: int = 1280, mode: str = "light"):
        html = f"""<!doctype html><html lang="en" data-theme="{mode}"><meta charset="utf-8"><title>page</title>
            <meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}
            * {{ box-sizing: border-box }} body {{ margin: 0; background: var(--paper); color: var(--pbh-text) }}
            fieldset {{ border: 0; padding: 0 }} /* as the theme */
            article {{ max-width: 996px; margin: 0 auto; padding: 0 18px }}</style>
            <main><article class="bd-article"><h1>Page</h1>{live_html(extension)}</article></main></html>"""
        return opened(html, address, width, CLIPBOARD)

    return open_at


def typed(page, **fields: object) -> None:
    for name, value in fields.items():
        place = page.locator(f"[name={name.replace('_', '-')}]")
        place.fill(str(value))
        place.dispatch_event("change")  # as by Enter


def wrong(page) -> dict[str, str]:
    """The sentences beside fields."""
    script = "all => Object.fromEntries(all.map(one => [one.id.slice(6), one.textContent]).filter(one => one[1]))"
    return page.locator(".wrong").evaluate_all(script)


def verdict(page) -> str:
    return page.inner_text(".verdict")


def test_what_it_says_is_what_python_says(page_at):
    run = Training(PRESET_MODELS["llama-13b"], Cluster(GPUS["a100"], 16), stack_for("llama3", "a100"), 256)
    layout = Layout4D(2, 1, 2, 4, 1, 2, 1, True)
    page = page_at("#model=llama-13b&gpu=a100&gpus=16&seq=4096&batch=256&stack=llama3&tp=2&cp=1&pp=2&v=2&b=1&zero=1")
    held, time = memory_bytes(run, layout), step_s(run, layout)
    assert f"Peak memory is {held.total / 1e9:.1f} GB per GPU" in verdict(page)
    assert f"{time.total:#.3g} s at {100 * run.utilisation(time.total):.1f}% MFU" in verdict(page)
    listed = page.text_content(".kinds ul >> nth=0")
    assert f"activations {held.activations / 1e9:.1f} GB" in listed
    assert {kind: kind in listed for kind in held._fields} == {kind: n > 0 for kind, n in held._asdict().items()}
    first = best_layouts(run)[0]
    assert f"tp {first.layout.tp} · " in page.inner_text(".best button >> nth=0")
    assert f"{first.memory.total / 1e9:.1f} GB" in page.inner_text(".best button >> nth=0")


def test_what_each_axis_sends_and_what_hides_of_it(page_at):
    """The table of messages, against what the command prints."""
    page = page_at("?gpus=64&tp=4&pp=4&b=1&cp=2&batch=256")
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 256)
    layout = Layout4D(4, 2, 4, 2, sequence_parallel=True)
    rows = page.locator(".messages tbody tr").all()
    sends = report_of_layout(run, layout).sends
    assert [one["what"].partition(":")[0] for one in sends] == ["tp", "cp", "dp", "pp"] and len(rows) == 4
    for row, sent in zip(rows, sends, strict=True):
        whole, late, hidden = sent["seconds"], sent["latency_s"], sent["hidden_s"]
        speed = sent["bytes"][0] / (whole - late) / 1e9
        words = f"{sent['what'].replace(':', '')}, {sent['where']} at {shown(speed)} GB/s"
        said = row.locator("th, td").all_inner_texts()
        assert said[0] == words and said[2].strip() == f"latency {shown(late)}"
        assert [said[1], *said[3:]] == [shown(n) for n in (sent["bytes"][0] / 1e9, hidden, whole - hidden)]
        bars = [bar.bounding_box()["width"] for bar in row.locator("i").all()]
        assert bars[0] == pytest.approx(sum(bars) * hidden / whole, abs=0.5)
    assert "tp" not in page_at("?model=llama3-8b&gpus=8&tp=1&b=1&batch=64").text_content(".messages tbody")
    assert page_at("?model=llama3.2-3b&gpus=1&tp=1&b=1&batch=64").text_content(".messages") == "", "nothing is sent"


def shown(number: float) -> str:
    """As the page has it."""
    return (
        f"{number:,.0f}"
        if number >= 999.5
        else f"{number:#.3g}".rstrip(".")
        if number >= 0.001
        else "<0.001"
        if number
        else "0"
    )


@pytest.mark.parametrize(("rows", "word", "ink"), [(1, "It fits.", "ok"), (4, "It is tight.", "tight")])
def test_a_verdict_of_three_values(page_at, rows, word, ink):
    """73 of 80 GB are not green; the stack, a stack that turns it, and how many published layouts ran are there."""
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 1024)
    layout = Layout4D(8, 1, 2, 4, rows, sequence_parallel=True)
    page = page_at(f"?gpus=64&tp=8&pp=2&b={rows}")
    held = memory_bytes(run, layout).total
    assert verdict(page).startswith(word) and page.get_attribute(".verdict strong", "class") == ink
    rests = verdict_text(run, layout).partition(" of ")[2]
    assert f"Peak memory is {held / 1e9:.1f} GB per GPU, of {rests}. " in verdict(page)
    assert ran_text(held, run.room_bytes)[2:] in verdict(page)


def test_adapters_on_a_card_of_24_gb(page_at):
    """An 8B in 4 bit with adapters fits; there are no seconds, and the page says why."""
    card = "gpu=other&peak=165&memory=24&memory-bandwidth=1008&link=32&network=12.5&per-node=8"
    asked = "model=llama3-8b&gpus=1&batch=16&seq=2048&tp=1&b=1&zero=0&rank=16"
    page = page_at(f"?{asked}&{card}&trained=4bit")
    device = Device(24e9, 165e12, 1008e9, 32e9, 12.5e9, None, "typed")
    model = replace(PRESET_MODELS["llama3-8b"], context=2048)
    run = Training(model, Cluster(device, 1), stack_for("megatron", "h100"), 16, Adapters(16, "4bit"))
    said = verdict(page)
    assert said.startswith(
        "It fits. Peak memory is 19.3 GB per GPU, of 24.0 GB with adapters of rank 16 on a base in 4"
    )
    assert f"{run.no_seconds}." in said and "A step takes" not in said
    assert not page.is_visible("figure >> nth=1") and not page.is_visible(".answers")
    (layout, held), *_ = layouts_by_memory(run)
    assert f"{held.total / 1e9:.1f} GB" in page.inner_text(".best button >> nth=0") and layout.tp == 1
    page.select_option("[name=trained]", "16bit")
    assert verdict(page).startswith("It does not fit.") and "trained=16bit" in page.url
    page.select_option("[name=trained]", "all")
    assert page.is_visible("figure >> nth=1") and "With enough memory a step would take" in verdict(page)


def test_an_optimizer_and_offload_are_chosen(page_at):
    page = page_at("?model=llama-13b&gpus=8&batch=64&tp=1&pp=1&b=1&zero=3&recompute=full")
    run = Training(PRESET_MODELS["llama-13b"], Cluster(GPUS["h100"], 8), stack_for("megatron", "h100"), 64)
    layout = Layout4D(1, 1, 1, 8, 1, 1, 3, recompute="full")
    for optimizer in ("adam-8bit", "muon", "sgd", "adam"):
        page.select_option("[name=optimizer]", optimizer)
        stack = replace(run.stack, recipe=recipe_of_optimizer(run.stack.recipe, optimizer))
        held = memory_bytes(replace(run, stack=stack, optimizer=optimizer), layout)
        assert f"Peak memory is {held.total / 1e9:.1f} GB" in verdict(page)
        assert page.is_visible(".answers") == (optimizer != "muon")
    page.select_option("[name=offload]", "parameters")
    held = memory_bytes(replace(run, offload="parameters"), layout)
    assert f"Peak memory is {held.total / 1e9:.1f} GB" in verdict(page) and "seconds are not modelled" in verdict(
        page
    )
    page.check("input[name=zero][value='1']")
    assert "Impossible. Offloaded parameters are shards of ZeRO-3" in verdict(page)


def test_gradients_that_are_kept_whole(page_at):
    page = page_at("?model=llama3-8b&gpus=8&batch=64&seq=4096&tp=1&b=2&zero=3&recompute=full&stack=fsdp")
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], 8), stack_for("fsdp", "h100"), 64)
    run = replace(run, model=replace(run.model, context=4096))
    for size in (0, 2, 4):
        page.check(f"input[name=whole][value='{size}']")
        wide = replace(run, stack=replace(run.stack, whole_gradient_bytes=size))
        held = memory_bytes(wide, Layout4D(1, 1, 1, 8, 2, 1, 3, recompute="full"))
        assert f"gradients {held.gradients / 1e9:.1f} GB" in page.text_content(".kinds ul >> nth=0")
    assert "whole=4" in page.url and held.gradients > 30e9


def test_the_address_keeps_what_was_chosen(page_at):
    page = page_at()
    assert "It does not fit." in verdict(page) and "?" not in page.url
    page.focus("input[name=pp]:checked")
    page.keyboard.press("ArrowRight")
    assert "It is tight." in verdict(page) and "pp=2" in page.url
    assert page.get_attribute(".verdict", "aria-live") == "polite"
    typed(page, gpus=128)
    said, address = verdict(page), page.url
    page.reload()
    assert (verdict(page), page.url) == (said, address)
    page.keyboard.press("Tab")
    page.focus(".best button >> nth=1")
    page.keyboard.press("Enter")
    assert "It fits." in verdict(page) and "gpus=128" in page.url
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true", "the focus stays there"


def test_the_impossible_is_marked_and_explained(page_at):
    page = page_at("?tp=8&pp=2&gpus=64")
    assert page.get_attribute("input[name=zero][value='3']", "title").startswith("ZeRO-3")
    assert page.get_attribute("input[name=zero][value='0']", "title") == ""
    page.check("input[name=zero][value='3']")
    assert verdict(page).startswith("Impossible. ZeRO-3") and not page.is_visible("figure >> nth=0")
    assert not page.get_attribute("input[name=search][value=all]", "title"), "it is no part of a layout"
    page.locator(".best button >> nth=0").click()
    assert verdict(page).startswith("It fits.") and page.is_visible("figure >> nth=0")


def test_another_schedule_is_searched_where_it_is_chosen(page_at):
    page = page_at("#model=llama-70b&gpus=64&batch=64&tp=8&pp=4")
    assert "ZB" not in page.inner_text(".best") and "of all layouts" not in page.inner_text(".best")
    page.check("input[name=schedule][value='zb-v']")
    assert "choose v 2" in verdict(page) and "of all layouts" in page.inner_text(".best")
    page.check("input[name=v][value='2']")
    assert verdict(page).startswith("It fits.") and "schedule=zb-v" in page.url
    page.locator(".best button >> nth=0").click()
    assert "of all layouts" in page.inner_text(".best") and "search=all" in page.url


def test_a_sweep_is_drawn_and_listed(page_at):
    """As many points as layouts; one node sends nothing over a network; and the address keeps it."""
    page = page_at("?gpus=64&batch=256&tp=4&pp=4&b=1&network=5")
    assert not page.is_visible(".sweep")
    page.check("input[name=sweep][value=gpus]")
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 256)
    run = replace(run, cluster=replace(run.cluster, device=replace(GPUS["h100"], network_Bps=5e9)))
    rows = sweep(run, "gpus")
    assert page.locator(".sweep circle").count() == sum(row.planned is not None for row in rows) == 6
    said = page.inner_text(".sweep table")
    for row in rows:
        assert f"{row.tokens_per_s_per_gpu:,.0f}" in said and row.reason in said and row.nothing in said
    assert "nothing fits" in said and "sweep=gpus" in page.url
    again = page_at("?" + urlsplit(page.url).query)
    assert again.inner_text(".sweep") == page.inner_text(".sweep")
    assert violations(again) == []
    typed(page, gpus=8)
    page.check("input[name=sweep][value=network]")
    assert "send nothing over a network" in page.inner_text(".sweep")
    page.check("input[name=sweep][value=off]")
    assert not page.is_visible(".sweep")


def test_a_library_is_told_its_lack(page_at):
    """No pipeline for fully_shard, unless it is told that it would be faster; the choices of torchtitan have one."""
    page = page_at("?gpus=64&batch=64&stack=fsdp&network=1&tp=8&zero=1&b=1&recompute=full")
    best = page.inner_text(".best ol")
    assert " · pp 1 · " in best and not re.search("pp [2-9]", best)
    assert re.search("With a pipeline.*, which fully_shard does not have, .* times as fast", page.inner_text(".lack"))
    page.select_option("[name=stack]", "torchtitan")
    assert re.search("pp [2-9]", page.inner_text(".best ol")) and "pipeline" not in page.inner_text(".best")


def test_a_misspelt_address_changes_nothing(page_at):
    said = verdict(page_at())
    assert verdict(page_at("#tp=x&stack=<b>&__proto__=1&zero=&nothing")) == said


def test_where_nothing_fits_the_smallest_is_offered(page_at):
    page = page_at("#model=llama-405b&gpus=8")
    assert "nothing fits" in page.text_content(".best") and page.locator(".best button").count() == 1
    assert re.search("; use .* GPUs\\.", page.text_content(".best"))
    page.locator(".best button").click()
    assert "It does not fit." in verdict(page)
    page = page_at("?gpus=24")
    said = page.text_content(".best")
    assert "the batch is the reason" in said and "of 1,024 divides" in said


def test_a_preset_is_picked_and_its_days_and_money_are_answered(page_at):
    page = page_at("?gpus=64&tp=8&pp=4&b=1&batch=256")
    page.select_option("[name=model]", "qwen3-32b")
    page.select_option("[name=gpu]", "h200")
    page.click(".money summary")
    typed(page, tokens="15.6T", price=2.5, seq="8,192", batch=192)
    run = Training(
        replace(PRESET_MODELS["qwen3-32b"], context=8192),
        Cluster(GPUS["h200"], 64),
        stack_for("megatron", "h200"),
        192,
    )
    layout = Layout4D(8, 1, 4, 2, 1, 1, 1, True)
    of = report_of_layout(run, layout, 15.6e12, 2.5).answers
    said = page.inner_text(".answers")
    assert f"{of['tokens_per_s']:,.0f} tokens/s, {of['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" in said
    assert f"15,600 billion tokens: {of['days']:,.1f} days, {of['gpu_hours']:,.0f} GPU hours" in said
    assert f"{of['money']:,.0f} at 2.5 per GPU hour" in said and f"MFU {of['mfu']:.1%}" in said
    assert "32.76 billion parameters" in page.inner_text(".ranks") and wrong(page) == {}


def test_a_config_is_pasted_or_picked_and_goes_into_the_link(page_at, tmp_path):
    page = page_at("?gpus=64&tp=8&pp=4&b=1")
    page.select_option("[name=model]", "config")
    assert verdict(page) == "No answer. Paste a config.json, or pick its file."
    config = LLAMA8 | {"torch_dtype": "bfloat16", "warp": 9, "vision_config": {"depth": 2}, "rope_theta": 5e5}
    typed(page, config=json.dumps(config, indent=2))
    said, notes = verdict(page), page.locator(".config li").all_text_contents()
    assert said.startswith("It fits.") and "8.03 billion parameters" in page.inner_text(".ranks")
    assert "d_model 4096: from hidden_size" in notes and notes[-1] == "not understood: warp 9"
    assert "context 4096: from the form; the config has a maximum, 8192" in notes
    page.click(".copy")
    link = page.evaluate("window.copied")
    asked = parse_qs(urlsplit(link).query)
    assert "torch_dtype" not in asked["config"][0] and len(link) < 1200
    other = page_at("?" + urlsplit(link).query)
    assert verdict(other) == said and other.locator(".config li").all_text_contents() == notes
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma-2-9b"][0]))
    other.set_input_files("input[type=file]", tmp_path / "config.json")
    other.wait_for_function("document.querySelector('.ranks').textContent.startsWith('9.24')")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1_000_001)
    other.set_input_files("input[type=file]", tmp_path / "model.safetensors")
    other.wait_for_function("document.querySelector('.verdict').textContent.includes('No answer')")
    assert wrong(other)["config"] == "model 'model.safetensors' is not a preset: paste its config.json"


def test_a_mixture_of_experts_that_is_not_known_is_not_modelled(page_at):
    page = page_at("?model=dbrx-132b")
    assert verdict(page) == f"No answer. {wrong(page)['config']}"
    assert wrong(page)["config"] == "dbrx-132b: a mixture of experts is not modelled"
    typed(page, config='{"model_type": "dbrx", "num_local_experts": 8}')
    assert wrong(page)["config"].startswith("num_local_experts 8 is not modelled; a mixture of experts")
    typed(page, config="Qwen/Qwen3-32B")
    assert wrong(page) == {} and "32.76 billion parameters" in page.inner_text(".ranks")
    assert page_at("?model=Qwen/Qwen3-32B").input_value("[name=model]") == "qwen3-32b"
    assert "a mixture of experts, keeping weights in FP8, FP4." in page.inner_text(".end")


def test_a_card_is_typed(page_at):
    page = page_at("?model=llama3-8b&gpus=16&tp=8&b=1&batch=64&zero=1&seq=2048")
    assert not page.is_visible("[name=peak]")
    page.select_option("[name=gpu]", "other")
    assert page.is_visible("[name=peak]") and page.input_value("[name=memory]") == "80"
    figures = {"peak": 165, "memory": 24, "memory_bandwidth": "1,008", "link": 25, "network": 12.5, "per_node": 4}
    typed(page, **figures)
    card = Device(24e9, 165e12, 1008e9, 25e9, 12.5e9, None, "typed")
    model = replace(PRESET_MODELS["llama3-8b"], context=2048)
    run = Training(model, Cluster(card, 16, 4), stack_for("megatron", "rtx4090"), 64)
    layout = Layout4D(8, 1, 1, 2, 1, 1, 1, True)
    held, time = memory_bytes(run, layout), step_s(run, layout)
    assert f"Peak memory is {held.total / 1e9:.1f} GB per GPU" in verdict(
        page
    ) and "GB per GPU, of 24.0 GB with" in verdict(page)
    assert f"{time.total:#.3g} s" in verdict(page) and "per-node=4" in page.url and "memory-bandwidth=1" in page.url
    # With other figures a preset keeps its constants; choosing one sets them.
    page.select_option("[name=gpu]", "a100")
    assert page.input_value("[name=network]") == "25" and "network" not in page.url
    typed(page, network=12.5)
    slow = replace(
        run, cluster=Cluster(replace(GPUS["a100"], network_Bps=12.5e9), 16), stack=stack_for("megatron", "a100")
    )
    assert f"{step_s(slow, layout).total:#.3g} s" in verdict(page) and "network=12.5" in page.url
    named = page_at("?gpu=rtx4090&memory=24")
    assert set(wrong(named)) == {"peak", "memory-bandwidth", "link", "network"} and "per-node" not in wrong(named)


def test_every_field_refuses_nonsense_beside_it(page_at):
    page = page_at("?peak=989&tokens=1T")
    fields = "gpus batch seq peak memory memory-bandwidth link network per-node tokens price".split()
    for name in fields:
        before, said = page.input_value(f"[name={name}]"), verdict(page)
        for text in ("-1", "0", "12x", "<b>") if name not in ("tokens", "price") else ("-1", "0", "12x"):
            typed(page, **{name: text})
            assert set(wrong(page)) == {name} and re.fullmatch(r"Give a .*, such as .*\.", wrong(page)[name])
            assert verdict(page).startswith("No answer.") and not page.is_visible(".more")
            assert page.get_attribute(f"[name={name}]", "aria-describedby") == f"wrong-{name}"
            assert page.get_attribute(f"[name={name}]", "aria-invalid") == "true"
        typed(page, **{name: before})
        assert (
            wrong(page) == {}
            and verdict(page) == said
            and page.get_attribute(f"[name={name}]", "aria-invalid") is None
        )
    assert wrong(page_at("?gpus=2,000,000"))["gpus"] == "Give a whole number from 1 to 1,048,576, such as 64."


def test_a_link_opens_the_same_answer(page_at):
    query = (
        "?model=llama3-405b&gpus=576&batch=576&seq=8192&tp=8&pp=9&cp=2&v=7&b=1&zero=1&recompute=full&every=2&loss=8"
    )
    page = page_at(query)
    assert page.locator("input[name=pp]:checked").get_attribute("value") == "9", "no power of two"
    run = Training(PRESET_MODELS["llama3-405b"], Cluster(GPUS["h100"], 576), stack_for("megatron", "h100"), 576)
    layout = Layout4D(8, 2, 9, 4, 1, 7, 1, True, "full", every=2, loss_chunks=8)
    assert f"Peak memory is {memory_bytes(run, layout).total / 1e9:.1f} GB" in verdict(page)
    assert f"{step_s(run, layout).total:#.3g} s" in verdict(page)
    page.check("input[name=loss][value='4']")
    page.check("input[name=loss][value='8']")
    again = page_at("?" + urlsplit(page.url).query)
    assert verdict(again) == verdict(page) and again.inner_text(".more") == page.inner_text(".more")
    assert verdict(page_at(query.replace("?", "#"))) == verdict(page), "old links go on to work"


def test_hybrid_sharding_and_zero_3_with_tp(page_at):
    page = page_at("?model=llama3-8b&gpus=64&batch=64&tp=2&b=1&zero=hsdp&stack=fsdp&seq=8192")
    run = Training(
        replace(PRESET_MODELS["llama3-8b"], context=8192), Cluster(GPUS["h100"], 64), stack_for("fsdp", "h100"), 64
    )
    for zero, copies in (("hsdp", 8), ("3", 1)):
        page.check(f"input[name=zero][value='{zero}']")
        layout = Layout4D(2, 1, 1, 32, 1, 1, 3, True, replicas=copies)
        assert f"Peak memory is {memory_bytes(run, layout).total / 1e9:.1f} GB" in verdict(page)
        assert "of all layouts" not in page.inner_text(".best"), "fully_shard has both"
    # Heads and layers that nothing splits: ZeRO is all that can be chosen.
    config = json.dumps(LLAMA8 | {"num_hidden_layers": 29, "hidden_size": 23 * 128} | dict.fromkeys(HEADS, 23))
    page = page_at(f"?model=config&config={quote(config)}&gpus=64&batch=64&stack=fsdp&seq=2048&search=all")
    run = replace(run, model=shape_of(json.loads(config), 2048)[0])
    best = best_layouts(run, ALL_OPEN)
    assert sorted(one.layout.replicas for one in best) == [1, 1, 8] and "8 copies" in page.inner_text(".best")
    for i, one in enumerate(best):
        zero = "hsdp" if one.layout.replicas > 1 else str(one.layout.zero)
        page.locator(f".best button >> nth={i}").click()
        assert page.locator("input[name=zero]:checked").get_attribute("value") == zero
        assert page.get_attribute(f".best button >> nth={i}", "aria-pressed") == "true"
        assert f"Peak memory is {best[i].memory.total / 1e9:.1f} GB" in verdict(page)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_the_verdict_and_the_bars_stay_in_sight(page_at, mode):
    page = page_at("?gpus=64", width=390, mode=mode)
    inside = (
        "one => { const { top, bottom } = one.getBoundingClientRect(); return top >= 0 && bottom <= innerHeight; }"
    )
    for name in ("tp", "schedule", "zero"):
        page.locator(f"input[name={name}]:checked").scroll_into_view_if_needed()
        assert page.locator(".verdict").evaluate(inside), name
        assert page.locator("figure svg").evaluate_all(f"all => all.every({inside})"), name
    assert page.locator(".now").evaluate("one => one.clientHeight") < 200
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []


def test_on_a_narrow_phone_tables_scroll_in_boxes_that_show_it(page_at):
    page = page_at("?gpus=64&tp=4&pp=4&b=1&sweep=batch", width=320)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for name in (".messages", ".sweep"):
        box = page.locator(f"{name} div:has(> table)")
        assert box.evaluate("one => one.scrollWidth > one.clientWidth"), name
        assert "gradient" in box.evaluate("one => getComputedStyle(one).backgroundImage"), name
    assert violations(page) == []


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_desk_all_is_on_one_screen(page_at, mode):
    page = page_at("?gpus=64&tp=4&pp=4&b=1", mode=mode)
    page.locator("#planner").evaluate("one => one.scrollIntoView()")
    for what in ("form", ".verdict", "figure >> nth=1", ".best button >> nth=2"):
        box = page.locator(what).first.bounding_box()
        assert box["y"] >= -1 and box["y"] + box["height"] <= 900, what
    assert page.locator(".verdict").bounding_box()["x"] > page.locator("form").bounding_box()["width"]
    assert violations(page) == []
    page.goto(page.url.partition("?")[0] + "?gpu=other&model=config&tokens=1T")
    assert violations(page) == []


def test_on_paper_fields_stand_and_of_chips_the_chosen_ones(page_at):
    page = page_at("?gpus=64&tp=4&pp=4&b=1&tokens=1T", width=720)
    page.emulate_media(media="print")
    shown = {name: page.is_visible(f"[name={name}]") for name in ("gpus", "batch", "seq", "tokens", "peak")}
    assert shown == {"gpus": True, "batch": True, "seq": True, "tokens": True, "peak": False}
    assert page.locator("[name=tp] + span").evaluate_all(
        "all => all.filter(one => one.checkVisibility()).map(one => one.textContent)"
    ) == ["4"]
    assert page.locator(".now").evaluate("one => getComputedStyle(one).position") == "static"


def test_constants_that_the_page_names():
    said, stack = (BOOK / "will_it_fit.md").read_text(encoding="utf-8"), stack_for("megatron", "h100")
    assert f"{LINK_STEP_S * 1e6:.1f} µs on a link and {NETWORK_STEP_S * 1e6:.1f} µs on a network" in said
    assert f"up to {1 - stack.exposed_tp:.0%} of the tensor-parallel" in said
    assert [name for name in STACKS if stack_for(name, "h100").exposed_zero3 != 0.5] == ["megatron-2021"]


def test_how_far_to_trust_it_comes_from_the_rows(tmp_path):
    out = build(tmp_path, {"index": "# Page\n\n```{planner_trust}\n```\n"}, ["book_planner"])
    rows = {}
    for row in soup(out, "index").tbody("tr"):
        what, *cells = [cell.text for cell in row("td")]
        rows[row.th.text, what] = cells
    assert rows["megatron, h100", "seconds of a step"][:2] == ["17", "5"]
    assert rows["fsdp, h100-500w", "seconds of a step"] == ["0", "0", "0", "", "", "TT-H100 8B compiled"]
    missed = extension.numbers()["evidence"]["kempner-forge, h200"]["memory"]
    assert rows["kempner-forge, h200", "peak memory"][3:] == [percent(missed["median"]), percent(missed["worst"]), ""]
