"""A run as six frameworks are asked for it: a command or a file, in the fields of the planner.

The problem: one layout has six spellings, and a reader that skips what it does not know is wrong in silence. The idea:
tables (`frameworks/`, with sources). A key gives a field, is known to change neither bytes nor seconds, is not modelled
(with what that changes), or is not understood; and each flag says what it costs and saves: the same run without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from book.explain.files import ONE_NODE, Said, command, content, flags_of, read_text
from book.explain.flags import flags_text as flags_text
from book.explain.flags import recipe_kept
from book.explain.models import read_config as read_config
from book.explain.models import shape_of as shape_of
from book.explain.recognise import framework_of, refuse_other_files
from book.explain.shell_words import Undecided
from book.explain.tables import FOREIGN, FRAMEWORKS
from book.explain.tables import OFF as OFF
from book.explain.tables import SWITCHES as SWITCHES
from book.explain.tables import USUAL_TOKENS as USUAL_TOKENS
from book.explain.torchtitan_names import enter_flavor, enter_tokens, with_config
from book.explain.values import Asked, as_in_table, enter, left_over, refuse_keys, refuse_values, without_effect
from book.explain.values import refuse_keys as refuse_experts  # noqa: F401
from lib.planner.training import Layout4D, Stack, Training


def read_foreign(words: Sequence[str]) -> Asked:
    """Flags; or a file, recognised by its content, and flags that overrule it.

    Raises:
        ValueError: no such file, malformed, of no framework that is known, or a value that a field cannot have; or a
            key on which all numbers depend, and which is not understood.
    """
    name, said = _said(words)
    refuse_keys(said.keys)
    refuse_values(said.keys)
    if "model_type" in said.keys and "base_model" not in said.keys:
        raise ValueError(f"{name} is the config of a model; give it as --config {name}")
    framework = framework_of(said, name)
    table = FRAMEWORKS[framework]
    keys = with_config(said.keys, table)
    full = {as_in_table(key): key for key in keys}
    short = {key.rpartition(".")[2]: full[key] for key in full} | full  # with and without the names of sections
    asked = Asked(framework, table["defaults"] | table.get("kept", {}), {}, [], _remarks(said, short, keys, table))
    _enter_rows(asked, {key: (short[key], keys[short[key]]) for key in short}, table, name or "the command")
    _enter_launcher(asked, said)
    enter_tokens(asked, keys, table)
    enter_flavor(asked, keys, table)
    _settle(asked.found, table)
    rows = {*table["keys"], *table.get("bytes", {}), *table.get("tokens", {}), *FOREIGN["launcher"]["keys"]}
    left = {full[key]: keys[full[key]] for key in full if not {key, key.rpartition(".")[2]} & rows}
    notes = FOREIGN["explain"] | {"no_effect": f"{table['no_effect']} {FOREIGN['launcher']['no_effect']}"}
    counts = {key: value for key, value in left.items() if not without_effect(notes).search(as_in_table(key))}
    refuse_other_files(counts, re.compile(".+"), re.compile(FOREIGN["names_file"]["values"]))
    asked.notes.extend(left_over(left, notes))
    return asked


def _remarks(
    said: Said, short: Mapping[str, str], keys: Mapping[str, Any], table: Mapping[str, Any]
) -> tuple[str, ...]:
    """What a reader has to know of that no key says."""
    remarks = [f"with the flags of {', '.join(said.taken)}, which the command does not use"] if said.taken else []
    half = table.get("half", ())
    if half and not any(key in short and keys[short[key]] not in (False, "no") for key in half):
        remarks.append(f"no {' or '.join(half)}, so that it computes in float32, and 16 bit are counted")
    return tuple(remarks)


def _enter_rows(asked: Asked, said: Mapping[str, tuple[str, Any]], table: Mapping[str, Any], what: str) -> None:
    """Enter all keys that have a row, in the order of the rows.

    Raises:
        ValueError: keys that a script leaves open.
    """
    rows = [
        (*said[key], into)
        for kind in ("keys", "bytes")
        for key, into in table.get(kind, {}).items()
        if key in said and str(said[key][1]).lower() not in ("none", "null", "auto")
    ]
    unset = dict.fromkeys(key for key, value, _ in rows if isinstance(value, Undecided) or "$" in str(value))
    if len(unset) > 1:
        raise ValueError(f"{what} leaves open --{', --'.join(unset)}: add them after it, with values")
    for key, beside in table.get("needs", {}).items():
        if key in said and not any(said.get(one, ("", False))[1] is True for one in beside):
            asked.notes.append(
                f"not understood: {said[key][0]} without {' or '.join(beside)}; it is counted as with it"
            )
    for row in rows:
        enter(asked, *row)


def _said(words: Sequence[str]) -> tuple[str, Said]:
    """The name of the file, if the words name one, and what it says with the flags behind it."""
    is_file = words and not words[0].startswith("-") and (len(words) == 1 or Path(words[0]).is_file())
    if not is_file:
        return "", command(words)
    name = words[0]
    if name.endswith(".py"):
        if len(words) == 1:
            raise ValueError(f"{name} is Python, which is not run here: give the command that starts it")
        return "", command(words)
    said = content(read_text(name), name)
    return name, said._replace(keys=said.keys | dict(flags_of(words[1:])))


def _enter_launcher(asked: Asked, said: Said) -> None:
    """The ranks that a launcher starts; values that the script does not set are left open, for --gpus."""
    own = {as_in_table(key): key for key in said.launcher}
    mixed = {as_in_table(key): key for key in said.keys if as_in_table(key) in ("nproc_per_node", "nnodes")}
    for key, field in FOREIGN["launcher"]["keys"].items():
        if of := own.get(key) or mixed.get(key):
            value = said.launcher[of] if key in own else said.keys[of]
            if not isinstance(value, Undecided) and "$" not in str(value) and value not in ("auto", "gpu"):
                enter(asked, of, value, field)
    several = {"srun", "mpirun"} & {*said.launchers} or any(of in own for of in ("nnodes", "nodes", "num_nodes"))
    if "per_node" in asked.found and not several and ONE_NODE & {*said.launchers}:
        asked.found.setdefault("nodes", 1)


def _settle(found: dict[str, Any], table: Mapping[str, Any]) -> None:
    """Fields that follow from others."""
    if found.get("replicas") == "nodes":
        found["replicas"] = found.get("nodes", 1)
    if found.get("grouped"):
        found["num_kv_heads"] = found.get("groups", 1)
    if "d_model" in found:  # flags give the model, and the framework the sizes that they leave out
        width = 8 * found["d_model"] // 3 // 64 * 64 if found.get("gated") else 0
        found.update({"d_mlp": width, **table.get("model", {}), **found})
    if {"nodes", "per_node"} <= found.keys():
        found["gpus"] = found["nodes"] * found["per_node"]
    if table["name"] == "torchtitan":
        _keep_gathered(found)
    if found.get("pp", 1) > 1 and found["zero"] > table.get("zero_in_pipeline", 3):
        raise ValueError(f"{table['name']} has no ZeRO-{found['zero']} in a pipeline: choose stage 1, or no pipeline")


def _keep_gathered(found: dict[str, Any]) -> None:
    """With a pipeline, torchtitan keeps gathered parameters unless it is told otherwise: ZeRO-2."""
    if found.get("pp", 1) > 1 and found["zero"] == 3 and "reshards" not in found:
        found["zero"] = 2


def completed(asked: Asked, own: dict, training: Training, batch: int | None) -> tuple[Training, dict[str, Any]]:
    """The training, with batch (microbatches times ranks, if None) and stack; and fields of the layout, `own` first."""
    changed = {name: f"--{name} {n}" for name, n in own.items() if n != asked.found.get(name)}
    asked.by.update(changed)
    found = asked.found | own
    if asked.framework == "torchtitan":
        if "zero" not in changed:
            _keep_gathered(found)
        if found.get("pp", 1) == 1:  # its files name a schedule by default, without a pipeline for it
            for name in {"schedule", "stages_per_rank", "stage_layers"} - changed.keys():
                found.pop(name, None)
    tp, cp, pp, copies = (found.get(name, 1) for name in ("tp", "cp", "pp", "replicas"))
    dp = max(1, training.cluster.gpus // (tp * cp * pp))
    shards = found.get("shards", dp // copies)
    if shards * copies != dp:
        raise ValueError(f"{copies} copies of {shards} shards are not dp {dp}: give --gpus, or other shards")
    local = found.get("local", found.get("rows", 1))
    asked.by.update({"rows": asked.by["local"]} if "local" in asked.by and pp == 1 else {})
    if cp == 1 or found.get("attention") == training.stack.cp_attention:  # files name it without ranks for it
        found.pop("attention", None)
    layout = {name: found[name] for name in Layout4D._fields if name in found}
    layout |= {"dp": dp, "rows": found.get("rows", local if pp == 1 else 1)}
    layout |= {"zero": found["zero"] if dp * cp > copies else 0}
    layout |= {"replicas": copies if layout["zero"] else 1}  # without shards, all ranks along dp are copies
    layout |= {"sequence_parallel": tp > 1 and found.get("sequence_parallel", False)}
    if "stage_layers" in found:
        layout["stages_per_rank"] = max(1, training.model.num_layers // (pp * found["stage_layers"]))
        asked.by["stages_per_rank"] = asked.by["stage_layers"]
    of_stack = {one.name: found[one.name] for one in fields(Stack) if found.get(one.name, "stack") != "stack"}
    of_stack |= {"recipe": recipe_kept(training.stack.recipe, found)}
    batch = batch or local * found.get("accumulation", 1) * dp
    return replace(training, global_batch=batch, stack=replace(training.stack, **of_stack)), layout
