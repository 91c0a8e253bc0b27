"""A model of Hugging Face, or a command of another framework, in the planner.

    python -m book.explain train.sh --gpus 64                 # what each flag of this script costs and saves
    python -m book.explain --config config.json --gpus 64     # the fastest layouts for this model

The options are those of `python -m lib.planner`, and overrule what is read.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from book.explain.configs import completed, read_foreign
from book.explain.experts import config_with_experts, read_model
from book.explain.flags import flags_text
from book.explain.tables import FRAMEWORKS
from book.explain.values import Asked
from lib.cost.experts import ExpertShape
from lib.cost.models import NOT_MODELLED
from lib.planner.__main__ import (
    answered,
    layout_asked,
    options_given,
    planner_options,
    printed,
    printed_experts,
    trained_options,
    training_asked,
)
from lib.planner.training import Layout4D

ABOUT = "A command of Megatron-LM, or a file of torchtitan, Accelerate, DeepSpeed, nanotron or axolotl, flag by flag."


TRAINED = {
    "--optimizer",
    "--lora",
    "--base",
    "--offload",
}  # may stand beside the config of a model, not beside a file


def main(argv: list[str] | None = None) -> None:
    parser = planner_options("python -m book.explain", ABOUT)
    parser.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face, for the model")
    try:
        args, words = parser.parse_known_args(argv)
        if args.config and words and set(words[::2]) <= TRAINED:
            args, words = trained_options(parser).parse_known_args(argv)
        of_module = any(word.startswith("--module") for word in words)
        if args.config and of_module and not Path(args.config).is_file():  # both are torchtitan's
            words, args.config = [*words, "--config", args.config], None
        args.config = args.config or config_with_experts(words)
        words = [word for word in words if word != args.config]
        notes, foreign = [], None
        if args.config:
            if args.model:
                raise ValueError("--model and --config both name a model: give one of them")
            shape, notes = read_model(args.config, args.context)
            if isinstance(shape, ExpertShape):
                if words:
                    raise ValueError(f"{words[0]} asks for a run, and a model with experts is reported without one")
                print(printed_experts(args, shape, notes))
                return
            parser.set_defaults(**asdict(shape))
        if words or not args.config:
            foreign = read_foreign(words)
            parser.set_defaults(**foreign.found)
        args, _ = parser.parse_known_args(argv)
        said = explained(args, foreign, notes) if foreign else answered(args, notes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(said)


def explained(args: argparse.Namespace, foreign: Asked, notes: list[str]) -> str:
    """The report of the layout that a foreign command asks for; before it, each of its flags."""
    asked = options_given(args, Layout4D._fields)
    if args.sweep:
        raise ValueError("--sweep searches layouts for a model without a file: python -m lib.planner")
    if (kept := args.whole_gradient_bytes) not in (None, foreign.found.get("whole_gradient_bytes")):
        foreign.found["whole_gradient_bytes"] = kept
        foreign.by["whole_gradient_bytes"] = f"--whole-gradients {kept}"
    training, asked = completed(foreign, asked, training_asked(args, foreign.found | asked), args.batch)
    mine = layout_asked(training, asked, frozenset(FRAMEWORKS[foreign.framework].get("able", ())))
    notes = [*notes, *foreign.notes, *(f"not modelled: {name}" for name in options_given(args, NOT_MODELLED))]
    return printed(
        args,
        training,
        [mine],
        before=flags_text(foreign, training, mine),
        notes=notes,
        by=foreign.by,
        remarks=foreign.remarks,
    )


if __name__ == "__main__":
    main()
