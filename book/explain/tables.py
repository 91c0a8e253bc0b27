"""The tables of names: what each key of others means here. Facts, with their sources; a program reads only these.

`foreign.toml` has what holds of all, `models.toml` the sizes in a `config.json`, `experts.toml` the keys of experts,
and `frameworks/` a file for each framework.
"""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from lib.cost.sizes import ModelShape
from lib.planner.training import Stack

HERE = Path(__file__).parent


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


_COMMON = _read("foreign.toml")
FRAMEWORKS: dict[str, dict[str, Any]] = {
    table["name"]: table for table in (_read(f"frameworks/{file}.toml") for file in _COMMON["frameworks"])
}
FOREIGN = _COMMON | _read("models.toml") | _read("experts.toml") | {"explain": _COMMON["explain"] | FRAMEWORKS}

SWITCHES = {one.name for kind in (ModelShape, Stack) for one in fields(kind) if one.type == "bool"}
SWITCHES |= {"sequence_parallel", "fp8"}  # of a layout, and of a run
OFF = ("", "0", "0.0", "false", "no", "none", "null", "disabled", "auto", "default", "[]", "{}")
USUAL_TOKENS = 8192  # of a sequence, unless --seq says more or less
