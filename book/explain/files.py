"""The keys of a file: of TOML, JSON or YAML, dotted; or the flags of the command that a shell script runs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from book.explain.shell import commands
from book.explain.shell_words import Undecided

LAUNCHERS = {
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed",
    "accelerate",
    "accelerate.commands.launch",
    "srun",
    "mpirun",
}
ONE_NODE = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}  # unless they are told otherwise
TRAINS = re.compile(r"(^|/)(pre)?train\w*\.py$|^torchtitan(\.\w+)*\.train$")


class Said(NamedTuple):
    """What a file or a command says.

    Args:
        keys: of the program, or of the file, dotted.
        launcher: flags of what starts the ranks; they are not the program's.
        launchers, programs: by name, such as torchrun, pretrain_gpt.py.
        taken: variables of a script whose flags are among the keys, though its command does not use them.
    """

    keys: dict[str, Any]
    launcher: dict[str, Any]
    launchers: list[str]
    programs: list[str]
    taken: tuple[str, ...] = ()


def read_text(path: str | Path) -> str:
    """The text of a file, or an error that says which file is needed."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder; give a file in it" if path.is_dir() else f"there is no file {path}")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def content(text: str, name: str) -> Said:
    """What a text says; its first line tells what it is.

    Raises:
        ValueError: it is malformed, or has no keys; a script that reads another one, or starts several trainings.
    """
    kind = _kind(text, name)
    try:
        if kind:
            tree = tomllib.loads(text) if kind == "toml" else _json_or_yaml(text, kind)
            return Said(dict(_dotted(tree, name)), {}, [], [])
    except ModuleNotFoundError:
        raise ValueError(f"{name} is YAML, and to read it Python needs PyYAML: pip install PyYAML") from None
    except Exception as error:  # each module has its own
        raise ValueError(f"{name} is malformed: {' '.join(str(error).split())}") from None
    try:
        ran = commands(text)
    except ValueError as error:
        raise ValueError(f"{name} is no script that can be followed: {error}") from None
    settings = [file for file in ran.files if not re.search(r"(activate\w*|rc|profile|conda|modules?)(\.sh)?$", file)]
    if settings:
        raise ValueError(f"{name} reads another script, {settings[0]}: write what that one sets into this file")
    return _of_script(ran.run, ran.unused, name)


def _kind(text: str, name: str) -> str:
    """`toml`, `json` or `yaml`, or nothing for a script: by the end of its name, or else by its first line."""
    end = Path(name).suffix.lower().removeprefix(".").replace("yml", "yaml")
    if end in ("toml", "json", "yaml", "sh"):
        return end.replace("sh", "")
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    of = {r"\[+[\w.\"-]+\]+": "toml", r"\s*[{\[]": "json", r"---|[\"']?[\w-]+[\"']?\s*:(\s|$)": "yaml"}
    return next((kind for pattern, kind in of.items() if re.match(pattern, first)), "")


def _json_or_yaml(text: str, kind: str) -> Any:
    return json.loads(text) if kind == "json" else import_module("yaml").safe_load(text)


def _of_script(run: Sequence[Sequence[str]], unused: dict[str, list[str]], name: str) -> Said:
    """The command of a script that trains; flags in variables that nothing mentions are taken to belong to it."""
    words = [_words(one) for one in run if one and one[0] not in ("echo", "printf", "set", "mkdir")]
    with_flags = [one for one in words if any(word.startswith("--") for word in one)]
    training = [one for one in with_flags if LAUNCHERS & {*one} or any(TRAINS.search(word) for word in one)]
    found: list[list[str]] = []
    for one in training or with_flags:
        found += [one] if one not in found else []
    if len(found) > 1:
        ends = [next((word for word in one if word.endswith(".py")), one[0]) for one in found]
        unsure = [word.condition for one in found for word in one if isinstance(word, Undecided)]
        why = f" and nothing sets {unsure[0]}" if unsure else ""
        raise ValueError(
            f"{name} has {len(found)} commands ({', '.join(ends)}){why}: leave in it the one that trains"
        )
    taken = {name: dict(flags_of(_words(words))) for name, words in unused.items()}
    of_variables = {key: value for keys in taken.values() for key, value in keys.items()}
    said = command(found[0] if found else [])
    return said._replace(keys=of_variables | said.keys, taken=tuple(name for name, keys in taken.items() if keys))


def _words(words: Sequence[str]) -> list[str]:
    """The same words, those apart that stand in one string: `bash -c "torchrun --nnodes 1"`."""
    found: list[str] = []
    for word in words:
        many = not isinstance(word, Undecided) and re.search(r"(^|\s)--", word) and re.search(r"\s", word)
        found += word.split() if many else [word]
    return found


def command(words: Sequence[str]) -> Said:
    """What a command says: flags before the name of the program are its launcher's."""
    launchers = [word for word in words if Path(word).name in LAUNCHERS]
    programs = [i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("--")]
    programs += [i + 1 for i, word in enumerate(words[:-1]) if word == "-m" and words[i + 1] not in LAUNCHERS]
    names = [Path(words[i]).name for i in programs]
    if not launchers or not programs:
        return Said(dict(flags_of(words)), {}, launchers, names)
    start = min(programs)
    before, after = dict(flags_of(words[:start])), dict(flags_of(words[start + 1 :]))
    of_launch = any("accelerate" in one for one in launchers)  # the flags of `accelerate launch` are its keys
    keys = before | after if of_launch else after
    return Said(keys, before, [Path(one).name for one in launchers], names)


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--key value`, `--key=value` or `--key`, wherever they are; `--` ends the values of a flag."""
    key, values, unsure = "", [], None
    for word in [*words, "--"]:
        if word.startswith("--"):
            if key:
                yield key, unsure or typed_value(" ".join(values) or True)
            key, _, value = word[2:].partition("=")
            values = [value] if value else []
            unsure = word if isinstance(word, Undecided) else None
        elif not values or not re.fullmatch(r"-?[\d.]+", values[0]):  # a number ends them too
            values.append(word)
            unsure = unsure or (word if isinstance(word, Undecided) and not isinstance(unsure, Undecided) else None)


def typed_value(value: Any) -> Any:
    """A text that is a number or a truth as such."""
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?|true|false", value.lower()):
        return json.loads(value.lower())
    return value


def _dotted(tree: Any, name: str, before: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise ValueError(f"{name} must have keys and values, not a {type(tree).__name__}")
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, name, f"{before}{key}.")
        else:
            yield f"{before}{key}".lstrip("-"), typed_value(value)
