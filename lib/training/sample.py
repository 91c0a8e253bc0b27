"""A sample: what the trained model writes, the same text in every layout.

The problem: ranks that hold shards of the model would have to take every step of the text together, a token at a time.
The idea: a sample is short, so the ranks gather the full weights, and rank 0 writes alone, with the single-process GPT.
The random number of a token depends on the seed and its place only. What differs between layouts is the rounding of the
weights: in float32, seldom, a random number falls between two roundings of one probability, and the rest of the text is
another.
"""

from __future__ import annotations

import random

import torch

from lib.data import Corpus
from lib.launch import device
from lib.model import GPT
from lib.parallel_model import ParallelModel
from lib.training.config import TrainConfig

TEMPERATURE = 0.8  # below 1: likely tokens become more likely


@torch.no_grad()
def sample(model: ParallelModel, corpus: Corpus, config: TrainConfig) -> str:
    """The text of `config.corpus.sample` tokens that the model writes, on rank 0; "" on the others. All ranks call it.

    It begins after a line end, or, if the text has none, after the first token of the text.
    """
    state = model.full_state_dict()
    if model.mesh.world.rank > 0:
        return ""
    with torch.device("meta"):
        gpt = GPT(config.model)
    gpt.load_state_dict(state, assign=True)
    first = corpus.alphabet.find("\n") if corpus.alphabet else ord("\n")
    tokens = [first if first >= 0 and (corpus.train == first).any() else int(corpus.train[0])]
    gpt.eval()
    for i in range(config.corpus.sample):
        window = torch.tensor([tokens[-config.model.context :]], device=device())
        logits_V = gpt(window)[0, -1, : corpus.num_tokens].double()
        if not logits_V.isfinite().all():
            return "nothing: its numbers are not finite"
        below_V = (logits_V / TEMPERATURE).softmax(0).cumsum(0)
        drawn = random.Random(f"seed {config.seed} token {i}").random() * below_V[-1]
        tokens.append(int((below_V <= drawn).sum()))
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in corpus.decode(tokens[1:]))
