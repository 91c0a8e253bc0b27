"""Configurations of others: a model as Hugging Face writes it, and a run as four frameworks are asked for it.

The problem: of the forty keys of a config ten decide size and time, one layout has four spellings, and a reader that
skips what it does not know is wrong in silence. The idea: tables (`foreign.toml`, with sources). A key gives a field,
is known to change neither bytes nor seconds, is not modelled (with what that changes), or is not understood. A size
that is missing is an error, never a guess; and each flag says what it costs and saves: the same run without it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lib.cost.sizes import ModelShape
from lib.layout import whole_number
from lib.planner.report import wrapped
from lib.planner.search import Planned, memory_bytes
from lib.planner.seconds import step_s
from lib.planner.training import Layout4D, Stack, Training

FOREIGN = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
FRAMEWORKS = {name: table for name, table in FOREIGN["explain"].items() if "keys" in table}
SWITCHES = {one.name for kind in (ModelShape, Stack) for one in fields(kind) if one.type == "bool"}
SWITCHES |= {"sequence_parallel"}  # of a layout
OFF = ("", "0", "0.0", "false", "no", "none", "null", "disabled", "auto", "default", "[]", "{}")
USUAL_TOKENS = 8192  # of a sequence, unless --seq says more or less


class Asked(NamedTuple):
    """Values of fields that a configuration gives, the key of each, and notes on all keys that are not understood."""

    framework: str
    found: dict[str, Any]  # by field of a layout, model, stack or run
    by: dict[str, str]
    notes: list[str]


# ---- a model --------------------------------------------------------------------------------------------------------


def read_config(path: str | Path, tokens: int | None = None) -> tuple[ModelShape, list[str]]:
    """The model of a `config.json`, and notes on its keys.

    A config has only the maximum of `tokens` in a sequence; the default is 8,192, or the maximum if that is less.

    Raises:
        ValueError: not a JSON object; not a model whose size is known; a size that is missing or not a number.
    """
    text = read_text(path)
    try:
        config = json.loads(text)
        if isinstance(config, dict):
            return shape_of(config, tokens)
    except ValueError as error:
        raise ValueError(f"{path}{' is not JSON' * isinstance(error, json.JSONDecodeError)}: {error}") from None
    raise ValueError(f"{path} must be a JSON object, as Hugging Face writes it, not a {type(config).__name__}")


def shape_of(config: Mapping[str, Any], tokens: int | None = None) -> tuple[ModelShape, list[str]]:
    """The same for a config that is read already."""
    table, inner = FOREIGN["config"], config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else dict(config)
    refuse_experts(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in table["families"]:
        raise ValueError(f"model_type {kind!r} is not known; known are {', '.join(table['families'])}")
    family, asked = dict(table["families"][kind]), Asked(kind, {}, {}, [])
    while "like" in family:
        family = table["families"][family.pop("like")] | family
    apart = family.pop("apart", None)
    sizes = {key for keys in table["sizes"].values() for key in keys}
    for field, keys in (table["sizes"] | table["switches"]).items():
        for key in keys:
            if config.get(key) is not None:
                _enter(asked, key, config[key], field)
    if config.get("attention_bias") and "biases" in family:
        biases, key = ("all", "mlp_bias") if config.get("mlp_bias") else ("qkv", "attention_bias")
        _enter(asked, key, True, {"biases": {"true": biases}})
    given = family | asked.found
    if lacks := [" or ".join(keys) for field, keys in [*table["sizes"].items()][:-2] if field not in given]:
        raise ValueError(f"it lacks {', '.join(lacks)}, without which the size of a {kind} model is not known")
    most = given["context"]
    shape = ModelShape(**given | {"context": tokens or min(most, USUAL_TOKENS)})
    said = {one.name: f"{one.name} {getattr(shape, one.name)}" for one in fields(shape) if one.name != "context"}
    notes = [f"{said[field]}: from {key.split()[0]}" for field, key in asked.by.items() if field in said]
    rest = ", ".join(words for field, words in said.items() if field not in asked.by)
    notes.append(f"{rest}: of model_type {kind}")
    notes.append(f"context {shape.context}: {'--seq' if tokens else 'a default'}; the config has a maximum, {most}")
    notes += [f"not counted: {apart}"] if apart else []
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    if set(re.findall(r"\w+", str(config.get("layer_types")))) == {"full_attention"}:
        config["layer_types"] = None
    return shape, notes + left_over({key: value for key, value in config.items() if key not in sizes}, table)


# ---- a run ----------------------------------------------------------------------------------------------------------


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
    asked = Asked(framework, found := dict(table["defaults"]), {}, [])
    for key, into in table["keys"].items():
        if key in keys and str(said[keys[key]]).lower() not in ("none", "null", "auto"):
            _enter(asked, keys[key], said[keys[key]], into)
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


def completed(asked: Asked, own: dict, training: Training, batch: int | None) -> tuple[Training, dict[str, Any]]:
    """The training, with batch (microbatches times ranks, if None) and stack; and fields of the layout, `own` first."""
    asked.by.update({name: f"--{name} {n}" for name, n in own.items() if n != asked.found.get(name)})
    found = asked.found | own
    tp, cp, pp, copies = (found.get(name, 1) for name in ("tp", "cp", "pp", "replicas"))
    dp = max(1, training.cluster.gpus // (tp * cp * pp))
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
            without = layout._replace(**{field: (Layout4D._field_defaults | {"zero": 0})[field]})
        elif value:
            other = replace(training, stack=replace(training.stack, **{field: False}))
        if (without, other) != (layout, training):
            lines += [asked.by.get(field, f"{field} {value}, by default"), f"  {does.format(value)}"]
            if training.global_batch % (without.dp * without.rows) == 0:
                lines.append(f"  without it {_change(training, layout, other, without)}")
    return wrapped(lines)


def _change(training: Training, layout: Layout4D, other: Training, without: Layout4D) -> str:
    """How bytes and seconds differ in another layout, and which kind of each differs most."""
    said = []
    for of, unit, scale in ((memory_bytes, "GB", 1e9), (step_s, "s", 1)):
        a, b = of(training, layout), of(other, without)
        by = {kind: (y - x) / scale for kind, x, y in zip(a._fields, a, b, strict=True)}
        most = max(by, key=lambda kind: abs(by[kind]))
        said.append(f"{b.total / scale:.2f} {unit} ({(b.total - a.total) / scale:+.2f}; {most} {by[most]:+.2f})")
    return ", ".join(said)


# ---- keys and values ------------------------------------------------------------------------------------------------


def _enter(asked: Asked, key: str, value: Any, into: str | dict[str, dict]) -> None:
    """Enter the value of a key of a table."""
    text = str(value).lower()
    for field, meant in into.items() if isinstance(into, dict) else [(into, {"*": "said"})]:
        here = meant.get(text, meant.get("*", "" if text in OFF else "unknown"))
        if here == "unknown":
            asked.notes.append(f"not modelled: {key} {value}; known are {', '.join(meant)}")
            continue
        if here == "said" and field in SWITCHES:
            if not isinstance(value, int | float):
                raise ValueError(f"{key}={value!r} must be true, false or a number")
            here = bool(value)
        elif here == "said":
            if "$" in text:
                raise ValueError(f"{key} is {value}, which nothing sets; add --{key} N after the file")
            whole_number(key, value, 0 if field == "zero" else 1)
            here = value
        if here != "":
            asked.found[field], asked.by[field] = here, key if value is True else f"{key} {value}"


def left_over(said: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Notes on keys that are no fields, and not off: not modelled, with what that changes, or not understood."""
    no_effect = re.compile(rf"(^|\.)({'|'.join(table['no_effect'].split())})")
    keys: dict[str, list[str]] = {}
    for key, value in said.items():
        plain = key.replace("-", "_").lower()
        if str(value).lower() not in OFF and not no_effect.search(plain):
            both = f"{plain} {value}".lower()
            why = next((why for pattern, why in table["not_modelled"].items() if re.search(pattern, both)), "")
            keys.setdefault(why, []).append(key if isinstance(value, list | dict | bool) else f"{key} {value}")
    unknown = keys.pop("", [])
    notes = [f"not modelled: {', '.join(of)}: {why}" for why, of in keys.items()]
    return notes + ([f"not understood: {', '.join(unknown)}"] if unknown else [])


def refuse_experts(said: Mapping[str, Any]) -> None:
    """Raise a ValueError for experts, adapters and encoders: no number would hold for them."""
    for key, value in said.items():
        for pattern, why in FOREIGN["refused"].items():
            if re.search(pattern, key.replace("-", "_")) and str(value).lower() not in (*OFF, "1"):
                raise ValueError(f"{key} {value} is not modelled; {why}")


def read_text(path: str | Path) -> str:
    """The text of a file, or an error that says which file is needed."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder; give a file in it" if path.is_dir() else f"there is no file {path}")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def _content(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The keys of TOML, JSON or YAML, dotted, or the flags in a script; its first line tells which."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    try:
        if re.match(r"\[+[\w.\"-]+\]+", first):
            return _dotted(tomllib.loads(text), name)
        if re.match(r"\s*[{\[]", first):
            return _dotted(json.loads(text), name)
        if re.match(r"---|[\"']?[\w-]+[\"']?\s*:(\s|$)", first):
            return _dotted(import_module("yaml").safe_load(text), name)
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
            yield f"{before}{key}".lstrip("-"), _typed(value)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--key value`, `--key=value` or `--key`, wherever they are; `--` ends the values of a flag."""
    key, values = "", []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if key:
                yield key, _typed(" ".join(values) or True)
            key, _, value = word[2:].partition("=")
            values = [value] if value else []
        elif not values or not re.fullmatch(r"-?[\d.]+", values[0]):  # a number ends them too
            values.append(word)


def _typed(value: Any) -> Any:
    """A text that is a number or a truth as such."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?|true|false", value.lower()):
        return json.loads(value.lower())
    return value
