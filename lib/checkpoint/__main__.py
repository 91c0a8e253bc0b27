"""A checkpoint as a plain `state_dict`: `python -m lib.checkpoint runs/step-00000120 --out weights.pt`.

The file does not depend on ranks: `GPT(config).load_state_dict(torch.load("weights.pt"))`, with the sizes that
`run.json` names. It has the precision of the weights that the optimizer updates.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor

from lib.checkpoint.files import CheckpointError, check_files, reason
from lib.checkpoint.folder import RUN, run_of
from lib.checkpoint.storage import WEIGHT, as_one_box, check_shapes, files_of, read_boxes, read_metadata
from lib.model import GPT, GPTConfig


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lib.checkpoint", description="A checkpoint as a plain state_dict."
    )
    parser.add_argument("checkpoint", help="a folder such as runs/step-00000120")
    parser.add_argument("--out", required=True, metavar="FILE.pt", help="for torch.load")
    args = parser.parse_args(argv)
    try:
        state = _whole_weights(args.checkpoint)
    except CheckpointError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    try:
        with open(args.out, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: --out {args.out} could not be written: {reason(error)}\n")
    print(f"{args.out}: {len(state)} tensors, {os.path.getsize(args.out):,} bytes")


def _whole_weights(path: str) -> dict[str, Tensor]:
    """The `state_dict` of the full model in a checkpoint. Raises CheckpointError if it cannot be read."""
    sizes, metadata = run_of(path)["config"]["model"], read_metadata(path)
    check_files(path, files_of(metadata))
    try:
        with torch.device("meta"):
            model = GPT(GPTConfig(**sizes))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{RUN} of {path} has no sizes of a GPT: {error}") from None
    check_shapes({name: p.shape for name, p in model.named_parameters()}, metadata, path)
    weights = {}  # by parameter: two keys of a state_dict may share one
    for name, p in model.named_parameters():
        dtype = metadata.state_dict_metadata[WEIGHT + name].properties.dtype
        weights[p] = name, torch.empty(p.shape, dtype=dtype)
    read_boxes({WEIGHT + name: as_one_box(x) for name, x in weights.values()}, metadata, path)
    return {key: weights[p][1] for key, p in model.state_dict(keep_vars=True).items()}


if __name__ == "__main__":
    main()
