"""A checkpoint as a plain `state_dict`: `python -m lib.checkpoint runs/step-00000120 --out weights.pt`.

The file does not depend on ranks: `GPT(config).load_state_dict(torch.load("weights.pt"))`, with the sizes that
`run.json` names. It has the precision of the weights that the optimizer updates.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor

from lib.checkpoint.boxes import Box
from lib.checkpoint.checksums import check_files
from lib.checkpoint.folder import run_of
from lib.checkpoint.settings import CheckpointError
from lib.checkpoint.storage import WEIGHT, Stored, files_of, read_boxes, read_metadata
from lib.model import GPT, GPTConfig


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lib.checkpoint", description="A checkpoint as a plain state_dict."
    )
    parser.add_argument("checkpoint", help="a folder such as runs/step-00000120")
    parser.add_argument("--out", required=True, metavar="FILE.pt", help="for torch.load")
    args = parser.parse_args(argv)
    try:
        state = whole_weights(args.checkpoint)
        torch.save(state, args.out)
    except (CheckpointError, OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{args.out}: {len(state)} tensors, {os.path.getsize(args.out):,} bytes")


def whole_weights(path: str) -> dict[str, Tensor]:
    """The `state_dict` of the full model in a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    config, metadata = GPTConfig(**run_of(path)["config"]["model"]), read_metadata(path)
    check_files(path, files_of(metadata))
    with torch.device("meta"):
        model = GPT(config)
    whole = {}
    for name, p in model.named_parameters():
        stored = metadata.state_dict_metadata[WEIGHT + name]
        whole[name] = torch.empty(p.shape, dtype=stored.properties.dtype)
    boxes = {WEIGHT + name: Stored(x.shape, {Box((0,) * x.dim(), tuple(x.shape)): x}) for name, x in whole.items()}
    read_boxes(boxes, metadata, path)
    names = {id(p): name for name, p in model.named_parameters()}
    return {key: whole[names[id(p)]] for key, p in model.state_dict(keep_vars=True).items()}


if __name__ == "__main__":
    main()
