"""The layout that a foreign command or file asks for: Megatron-LM, torchtitan, Accelerate (FSDP), DeepSpeed.

The problem: one layout has four spellings, and a flag that a reader passes over makes a report of another run. The
idea: a table for each framework (`foreign.toml`, with sources), key → field. What is in no table is listed, and each
flag that is understood says what it costs and saves: the same run without it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lib.cost.sizes import RECIPES, ModelShape, check_kv_heads
from lib.layout import divisors
from lib.planner.configs import FOREIGN, read_text, whole
from lib.planner.search import memory_bytes
from lib.planner.seconds import has_even_stages, step_s
from lib.planner.training import Layout4D, Stack, Training

TABLES = {name: table for name, table in FOREIGN["explain"].items() if "keys" in table}
OFF = ("", "0", "0.0", "false", "no", "none", "null", "disabled", "auto", "default", "[]", "{}")
SWITCHES = (
    "sequence_parallel overlaps_dp fused_attention fused_swiglu gated rms_norm rotary tied dropout_masks".split()
)


@dataclass
class Asked:
    """What a command or a file asks for.

    Args:
        found: field of a layout, model, stack or run → value.
        by: field → the flag that says so.
        notes: what is not modelled, and what is not understood.
    """

    framework: str
    found: dict[str, Any]
    by: dict[str, str]
    notes: list[str]


def read_foreign(words: Sequence[str]) -> Asked:
    """Flags; or a file, recognised by its content, and flags that overrule it.

    Raises:
        ValueError: no such file, malformed, of no framework that is known, or a value that a field cannot have.
    """
    is_file = words and not words[0].startswith("-") and (len(words) == 1 or Path(words[0]).is_file())
    name = words[0] if is_file and not words[0].endswith(".py") else ""
    said = dict(_content(read_text(name), name) if name else ()) | dict(_flags(words[bool(name) :]))
    if "model_type" in said:
        raise ValueError(f"{name} is the config of a model; give it as --config {name}")
    full = {key.replace("-", "_"): key for key in said}
    keys = {short.rpartition(".")[2]: key for short, key in full.items()} | full
    of = max(TABLES, key=lambda framework: len(TABLES[framework]["keys"].keys() & keys))
    if not TABLES[of]["keys"].keys() & keys:
        raise ValueError(f"{name or 'this command'} has no key of {', '.join(TABLES)}")
    asked, read = Asked(of, dict(TABLES[of]["defaults"]), {}, []), set()
    for key, into in TABLES[of]["keys"].items():
        if key in keys:
            read.add(keys[key])
            _enter(asked, keys[key], said[keys[key]], into)
    return replace(asked, notes=asked.notes + _left({key: value for key, value in said.items() if key not in read}))


def model_asked(asked: Asked) -> ModelShape:
    """The model whose sizes the flags give, as those of Megatron-LM do.

    Raises:
        ValueError: a size is missing.
    """
    given = {one.name: asked.found[one.name] for one in fields(ModelShape) if one.name in asked.found}
    if lacks := [one.name for one in fields(ModelShape) if one.default is MISSING and one.name not in given]:
        raise ValueError(f"{asked.framework}: no flag gives {', '.join(lacks)}; add --model NAME or --config FILE")
    if asked.found.get("grouped"):
        given["num_kv_heads"] = asked.found.get("groups", 1)
    if given.get("gated") and not given.get("d_mlp"):  # as Megatron-LM has it: two thirds, in multiples of 64
        given["d_mlp"] = 4 * given["d_model"] * 2 // 3 // 64 * 64
    return ModelShape(**given)


def layout_asked(asked: Asked, training: Training, batch: int | None = None) -> tuple[Training, Layout4D]:
    """The layout, and the training with the batch and the overlap, that are asked for.

    Args:
        batch: sequences of a step, which overrules what is asked.

    Raises:
        ValueError: numbers that do not divide.
    """
    found, model, gpus = asked.found, training.model, training.cluster.gpus
    tp, cp, pp = (found.get(axis, 1) for axis in ("tp", "cp", "pp"))
    dp, v = max(1, gpus // (tp * cp * pp)), found.get("stages_per_rank", 1) if pp > 1 else 1
    if "stage_layers" in found:
        v = max(1, -(-model.num_layers // (pp * found["stage_layers"])))
    local = found.get("local", found.get("rows", 1))
    rows = found.get("rows", local if pp == 1 else 1)
    batch = batch or found.get("batch") or local * found.get("accumulation", 1) * dp
    copies = found.get("replicas", 1)
    copies = max(1, gpus // training.cluster.per_node) if copies == "nodes" else copies
    for n, of, what, whole_ in (
        (tp * cp * pp, gpus, f"tp {tp} x cp {cp} x pp {pp}", "GPUs"),
        (tp, model.num_heads, "tp", "heads"),
        (cp, model.context, "cp", "tokens"),
        (dp * rows, batch, f"dp {dp} x microbatches of {rows}", "sequences of a step"),
        (copies, dp * cp, "copies", "data-parallel ranks"),
    ):
        if of % n:
            raise ValueError(f"{what}: {n} does not divide {of:,} {whole_}; {_near(n, of)} does")
    check_kv_heads(model.num_kv_heads or model.num_heads, tp)
    if not has_even_stages(model.num_layers, pp * v):
        raise ValueError(
            f"{model.num_layers} blocks cannot be cut into {pp * v} equal stages (pp {pp} x {v} per rank)"
        )
    of_stack = {one.name: found[one.name] for one in fields(Stack) if found.get(one.name, "stack") != "stack"}
    if "recipe" in of_stack:
        of_stack["recipe"] = RECIPES[of_stack["recipe"]]
    slices = tp > 1 and found.get("sequence_parallel", False)
    sharded = found.get("zero", 0) if dp * cp > 1 else 0
    how = {name: found[name] for name in ("recompute", "schedule", "every") if name in found}
    layout = Layout4D(tp, cp, pp, dp, rows, v, sharded, slices, **how, replicas=copies)
    return replace(training, global_batch=batch, stack=replace(training.stack, **of_stack)), layout


def _near(n: int, of: int) -> int:
    return min(divisors(of), key=lambda other: (abs(other - n), other))


def flags_text(asked: Asked, training: Training, layout: Layout4D) -> str:
    """A paragraph for each flag: what a rank holds, sends and waits for by it, and the same run without it."""
    lines = [f"{asked.framework}: {TABLES[asked.framework]['source']}"]
    for field, does in FOREIGN["explain"]["does"].items():
        value = getattr(layout, field, asked.found.get(field))
        other, without = training, layout
        if field in ("tp", "cp", "pp"):
            without = layout._replace(**{field: 1, "dp": layout.dp * value})
        elif field in Layout4D._fields:
            without = layout._replace(**{field: Layout4D._field_defaults[field] if field != "zero" else 0})
        else:
            other = replace(training, stack=replace(training.stack, **{field: False}))
        if (without, other) == (layout, training) or value is False:
            continue
        lines.append(f"{asked.by.get(field, 'by default')}: a rank {does.format(value)}")
        if training.global_batch % (without.dp * without.rows) == 0:
            lines.append(f"    without it {_change(training, layout, other, without)}")
    return "\n".join(lines + asked.notes)


def _change(training: Training, layout: Layout4D, other: Training, without: Layout4D) -> str:
    """How bytes and seconds differ in another layout, and which kind of each differs most."""
    said = []
    for of, unit, scale in ((memory_bytes, "GB", 1e9), (step_s, "s", 1)):
        a, b = of(training, layout), of(other, without)
        by = {kind: (y - x) / scale for kind, x, y in zip(a._fields, a, b, strict=True)}
        most = max(by, key=lambda kind: abs(by[kind]))
        said.append(f"{b.total / scale:.2f} {unit} ({(b.total - a.total) / scale:+.2f}; {most} {by[most]:+.2f})")
    return ", ".join(said)


def _enter(asked: Asked, key: str, value: Any, into: str | dict[str, dict]) -> None:
    """Enter the value of a key that the table knows."""
    text = str(value).lower()
    if text in ("none", "null", "auto"):
        return
    for field, meant in into.items() if isinstance(into, dict) else [(into, {"*": "said"})]:
        here = meant.get(text, meant.get("*"))
        if here is None:
            asked.notes += [] if text in OFF else [f"not modelled: {key} {value}; known are {', '.join(meant)}"]
        elif here != "":
            asked.found[field], asked.by[field] = (
                _value(field, key, text) if here == "said" else here,
                f"{key} {value}",
            )


def _value(field: str, key: str, text: str) -> Any:
    if field in SWITCHES:
        return text not in OFF
    number = text.split()[0]
    if field == "zero" and number in ("0", "1", "2", "3"):
        return int(number)
    if "$" in number:
        raise ValueError(f"{key} is {number.upper()}, which nothing sets; add --{key} and a number behind the file")
    return whole(key, int(number) if re.fullmatch(r"-?\d+", number) else text)


def _left(said: dict[str, Any]) -> list[str]:
    """Notes on keys that the table does not know; a key that is off says nothing."""
    table = FOREIGN["explain"]
    no_effect = re.compile(r"(^|\.)(" + "|".join(map(re.escape, table["no_effect"].split())) + ")")
    why_not: dict[str, list[str]] = {}
    for key, value in said.items():
        plain = key.replace("-", "_").lower()
        text, on = f"{plain} {value}".lower(), str(value).lower() not in OFF
        for part, why in table["refused"].items():
            if part in plain and on and str(value) != "1":
                raise ValueError(f"{key} {value} is not modelled; {why}")
        why = next((why for part, why in table["not_modelled"].items() if part in text), "")
        if (on or why and "precision" in plain) and (why or not no_effect.search(plain)):
            why_not.setdefault(why, []).append(f"{key} {value}" if value is not True else key)
    unknown = why_not.pop("", [])
    notes = [f"not modelled: {', '.join(keys)}: {why}" for why, keys in why_not.items()]
    return notes + ([f"not understood: {', '.join(unknown)}"] if unknown else [])


# ---- files and flags → key and value --------------------------------------------------------------------------------


def _content(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The keys of JSON, TOML or YAML, dotted, or the flags in a script; its first line tells which."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    try:
        if re.match(r"\[+[\w.\"-]+\]+", first):
            return _dotted(tomllib.loads(text), name)
        if first.lstrip()[:1] in ("{", "["):
            return _dotted(json.loads(text), name)
        if re.match(r"---|[\"']?[\w-]+[\"']?\s*:(\s|$)", first):
            return _dotted(_yaml(text, name), name)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{name} is malformed: {error}") from None
    sets = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([\w.+-]+|\$\{\w+:-\w+\})", text, re.MULTILINE))
    sets = {key: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value) for key, value in sets.items()}
    text = re.sub(r"(^|\s)#.*", "", text)
    text = re.sub(r"\$\{?(\w+)(?::-\w+)?\}?", lambda match: sets.get(match[1], match[0]), text)
    return _flags(re.sub(r"[\\\"'()]", " ", text).split())


def _yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{name} is YAML: to read it, pip install PyYAML") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is malformed: {' '.join(str(error).split())}") from None


def _dotted(tree: Any, name: str, before: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise ValueError(f"{name} must have keys and values, not a {type(tree).__name__}")
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, name, f"{before}{key}.")
        else:
            yield f"{before}{key}".lstrip("-"), value


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--key value`, `--key=value` or `--key`, wherever they are; a flag may have several values."""
    key, values = "", []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if key:
                yield key, " ".join(values) or True
            key, _, value = word[2:].partition("=")
            values = [value] if value else []
        else:
            values.append(word)
