"""The layout that a foreign command or file asks for: Megatron-LM, torchtitan, Accelerate (FSDP), DeepSpeed.

The problem: one layout has four spellings, and a flag that a reader passes over makes a report of another run. The
idea: a table for each framework (`foreign.toml`, with sources), key → field. What is in no table is listed, and each
flag that is understood says what it costs and saves: the same run without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lib.layout import whole_number
from lib.planner.configs import FOREIGN, OFF, left_over, notes_text, read_text, refuse_experts
from lib.planner.search import Planned, memory_bytes
from lib.planner.seconds import step_s
from lib.planner.training import Layout4D, Stack, Training

FRAMEWORKS = {name: table for name, table in FOREIGN["explain"].items() if "keys" in table}
SWITCHES = (
    "sequence_parallel overlaps_dp fused_attention fused_swiglu gated rms_norm rotary tied dropout_masks".split()
)

WITHOUT = {"zero": 0, "sequence_parallel": False, "recompute": "none", "schedule": "1f1b"}  # further fields: 1


class Asked(NamedTuple):
    """What a command or a file asks for: values of fields, the flag that gives each, and what is not understood."""

    framework: str
    found: dict[str, Any]  # by field of a layout, model, stack or run
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
    refuse_experts(said)
    if "model_type" in said:
        raise ValueError(f"{name} is the config of a model; give it as --config {name}")
    full = {key.replace("-", "_"): key for key in said}
    keys = {short.rpartition(".")[2]: key for short, key in full.items()} | full
    framework, table = max(FRAMEWORKS.items(), key=lambda one: len(one[1]["keys"].keys() & keys))
    if not table["keys"].keys() & keys:
        raise ValueError(f"{name or 'the command'} has no key of {', '.join(FRAMEWORKS)}")
    asked = Asked(framework, dict(table["defaults"]), {}, [])
    for key, into in table["keys"].items():
        if key in keys:
            _enter(asked, keys[key], said[keys[key]], into)
    found = asked.found
    if found.get("replicas") == "nodes":
        found["replicas"] = found.get("nodes", 1)
    if found.get("grouped"):
        found["num_kv_heads"] = found.get("groups", 1)
    if "d_model" in found:  # flags give the model, and the framework the sizes that they leave out
        width = 8 * found["d_model"] // 3 // 64 * 64 if found.get("gated") else 0
        found.update({"d_mlp": width, **table.get("model", {}), **found})
    if {"nodes", "per_node"} <= found.keys():
        found["gpus"] = found["nodes"] * found["per_node"]
    if framework == "torchtitan" and found["zero"] == 3 and found.get("pp", 1) > 1 and "reshards" not in found:
        found["zero"] = 2  # with a pipeline, it keeps gathered parameters by default
    left = {key for short, key in full.items() if not {short, short.rpartition(".")[2]} & table["keys"].keys()}
    asked.notes.extend(left_over({key: value for key, value in said.items() if key in left}, FOREIGN["explain"]))
    return asked


def _enter(asked: Asked, key: str, value: Any, into: str | dict[str, dict]) -> None:
    """Enter the value of a key that the table knows."""
    text = str(value).lower()
    if text in ("none", "null", "auto"):
        return
    for field, meant in into.items() if isinstance(into, dict) else [(into, {"*": "said"})]:
        here = meant.get(text, meant.get("*", "" if text in OFF else "unknown"))
        if here == "unknown":
            asked.notes.append(f"not modelled: {key} {value}; known are {', '.join(meant)}")
            continue
        if here == "said" and field in SWITCHES:
            here = text not in OFF
        elif here == "said":
            if "$" in text:
                raise ValueError(f"{key} is {value}, which nothing sets; add --{key} N after the file")
            here = int(text) if re.fullmatch(r"-?\d+", text) else text
            whole_number(key, here, 0 if field == "zero" else 1)
        if here != "":
            asked.found[field], asked.by[field] = here, key if value is True else f"{key} {value}"


def completed(asked: Asked, training: Training, batch: int | None) -> tuple[Training, dict[str, Any]]:
    """The training, with the batch (microbatches times ranks, if None) and the overlap; and fields of the layout."""
    found, gpus = asked.found, training.cluster.gpus
    tp, cp, pp, copies = (found.get(name, 1) for name in ("tp", "cp", "pp", "replicas"))
    dp = max(1, gpus // (tp * cp * pp))
    shards = found.get("shards", dp // copies)
    if shards * copies != dp:
        raise ValueError(f"{copies} copies of {shards} shards are not dp {dp}: give --gpus, or other shards")
    local = found.get("local", found.get("rows", 1))
    asked.by.update({"rows": asked.by["local"]} if "local" in asked.by and pp == 1 else {})
    layout = {name: found[name] for name in Layout4D._fields if name in found}
    layout |= {"dp": dp, "rows": found.get("rows", local if pp == 1 else 1)}
    layout |= {"zero": found["zero"] if dp * cp > copies else 0}
    layout |= {"sequence_parallel": tp > 1 and found.get("sequence_parallel", False)}
    if "stage_layers" in found:
        layout["stages_per_rank"] = max(1, training.model.num_layers // (pp * found["stage_layers"]))
        asked.by["stages_per_rank"] = asked.by["stage_layers"]
    of_stack = {one.name: found[one.name] for one in fields(Stack) if found.get(one.name, "stack") != "stack"}
    batch = batch or local * found.get("accumulation", 1) * dp
    return replace(training, global_batch=batch, stack=replace(training.stack, **of_stack)), layout


def flags_text(asked: Asked, training: Training, planned: Planned) -> str:
    """A paragraph for each flag: what a rank holds, sends and waits for by it, and the same run without it."""
    layout, lines = planned.layout, [f"{asked.framework}, flag by flag ({FRAMEWORKS[asked.framework]['source']})"]
    for field, does in FOREIGN["explain"]["does"].items():
        value = getattr(layout, field, asked.found.get(field))
        other, without = training, layout
        if field in ("tp", "cp", "pp"):
            without = layout._replace(**{field: 1, "dp": layout.dp * value})
        elif field in Layout4D._fields:
            without = layout._replace(**{field: WITHOUT.get(field, 1)})
        elif value:
            other = replace(training, stack=replace(training.stack, **{field: False}))
        if (without, other) != (layout, training):
            lines += [asked.by.get(field, f"{field} {value}, by default"), f"  {does.format(value)}"]
            if training.global_batch % (without.dp * without.rows) == 0:
                lines.append(f"  without it {_change(training, layout, other, without)}")
    return notes_text(lines + asked.notes)


def _change(training: Training, layout: Layout4D, other: Training, without: Layout4D) -> str:
    """How bytes and seconds differ in another layout, and which kind of each differs most."""
    said = []
    for of, unit, scale in ((memory_bytes, "GB", 1e9), (step_s, "s", 1)):
        a, b = of(training, layout), of(other, without)
        by = {kind: (y - x) / scale for kind, x, y in zip(a._fields, a, b, strict=True)}
        most = max(by, key=lambda kind: abs(by[kind]))
        said.append(f"{b.total / scale:.2f} {unit} ({(b.total - a.total) / scale:+.2f}; {most} {by[most]:+.2f})")
    return ", ".join(said)


# ---- files and flags → key and value --------------------------------------------------------------------------------


def _content(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The keys of TOML, JSON or YAML, dotted, or the flags in a script; its first line tells which."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    for looks, module, load in (
        (r"\[+[\w.\"-]+\]+", "tomllib", "loads"),
        (r"\s*[{\[]", "json", "loads"),
        (r"---|[\"']?[\w-]+[\"']?\s*:(\s|$)", "yaml", "safe_load"),
    ):
        if re.match(looks, first):
            try:
                return _dotted(getattr(import_module(module), load)(text), name)
            except ModuleNotFoundError:
                raise ValueError(f"{name} is YAML, and to read it Python needs PyYAML: pip install PyYAML") from None
            except Exception as error:  # each module has its own
                raise ValueError(f"{name} is malformed: {' '.join(str(error).split())}") from None
    text = re.sub(r"(^|\s)#.*", "", text)
    sets = dict(re.findall(r"^\s*(?:export )?(\w+)=[\"']?(?:\$\{\w+:-)?([\w.+-]+)", text, re.MULTILINE))
    text = re.sub(r"\$\{?(\w+)(?::-([\w.+-]+))?\}?", lambda of: sets.get(of[1], of[2] or of[0]), text)
    return _flags(re.sub(r"[\\\"']", " ", re.sub(r"[()\n]", " -- ", text)).split())


def _dotted(tree: Any, name: str, before: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise ValueError(f"{name} must have keys and values, not a {type(tree).__name__}")
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, name, f"{before}{key}.")
        else:
            yield f"{before}{key}".lstrip("-"), value


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--key value`, `--key=value` or `--key`, wherever they are; `--` ends the values of a flag."""
    key, values = "", []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if key:
                yield key, " ".join(values) or True
            key, _, value = word[2:].partition("=")
            values = [value] if value else []
        elif not values or not re.fullmatch(r"-?[\d.]+", values[0]):  # a number ends them too
            values.append(word)
