"""15.11: a loss that jumps at the restart, although everything was saved.

In June 2026 a Llama was pretrained from its configuration with NeMo AutoModel, stopped, and went on from its
checkpoint. The first loss after the restart was much larger than the last before. Saving and loading had been silent:
the file had all that the configuration asks for, and this Llama's head is to be its embedding. Here both losses are of
the same batch.
"""

import torch
from torch import nn

from course.museum.room import room
from lib import comm

SYMPTOM = "A restart after which the loss is larger"
SOURCE = (
    "[NeMo AutoModel #2511](https://github.com/NVIDIA-NeMo/Automodel/pull/2511), June 2026; "
    "[verl #7834](https://github.com/verl-project/verl/issues/7834), September 2026; "
    "[Megatron-LM #656](https://github.com/NVIDIA/Megatron-LM/issues/656), January 2024"
)
GUESSES = {
    "two copies where there should be one": "Before the restart the head was not the embedding: it had learned too, "
    "and the file does not hold it.",
    "a wrong dtype": "Then the restart would have rounded the embedding.",
    "a sum that is missing": "Then the ranks would have different embeddings.",
    "two ranks that read the same samples": "The two losses are of one batch: equal weights would give equal losses.",
}
CAUSE = """
The head was to be the embedding: one weight. The module was built without memory, `to_empty` gave each parameter its
own memory, and the two were not tied again, so that each learned from its own part of the gradient. The checkpoint
left out the head, because the configuration calls it a copy, and loading made it one. The fix ties the two after
`to_empty`, and leaves the head out only where they really share their memory. In verl the same fault was found before
it did harm; in Megatron-LM a user had seen in January 2024 that heads come untied during training.
"""
FIELDS = {
    "losses": "of each step, over the whole batch; two more: before the checkpoint, and after the restart from it",
    "trained": "name → weight on this rank, before the checkpoint",
    "loaded": "name → weight on this rank, after the restart",
}
LAYOUTS = ({"dp": 2}, {"dp": 3}, {"dp": 4})
FITS = False  # one process has the same fault


def program(mesh, seed):
    """Train a model whose head is its embedding, save it, and load it: the loss before and after."""
    dp, generator = mesh.group("dp"), torch.Generator().manual_seed(seed)
    drawn = torch.randn(8, 4, generator=generator, dtype=torch.float64) * (0.5, 2, 0.1)[seed % 3]
    words = torch.randint(8, (24, 2), generator=generator)  # a word, and the next
    now, following = words.chunk(dp.size)[dp.rank].T
    losses = []

    def loaded(file):  # rank 0 has it, the others get it by broadcast
        empty = {"device": "meta", "dtype": torch.float64}
        model = nn.Sequential(nn.Embedding(8, 4, **empty), nn.Linear(4, 8, bias=False, **empty))
        model[1].weight = model[0].weight
        model.to_empty(device="cpu")
        model[1].weight = model[0].weight  # again: each now has its own memory
        for weight in model.parameters():
            weight.data.copy_(comm.broadcast(file["embedding"], dp))
        return model

    def loss_of(model):
        loss = nn.functional.cross_entropy(model(now), following)
        losses.append(comm.all_reduce(loss.detach(), dp, op="mean").item())
        return loss

    def known(model):
        return {name: part.weight.detach() for name, part in zip(("embedding", "head"), model)}

    model = loaded({"embedding": drawn})
    for _ in range(4):
        gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
        for weight, gradient in zip(model.parameters(), gradients):
            weight.data -= comm.all_reduce(gradient, dp, op="mean")
    loss_of(model)
    again = loaded({"embedding": model[0].weight.detach()})  # the head is the same weight
    loss_of(again)
    return {"losses": losses, "trained": known(model), "loaded": known(again)}


SICK = """
model[1].weight = model[0].weight  # again: each now has its own memory => # the head is the embedding
or
for _ in range(4) => for step in range(4)
weight.data -= => old = weight.data.clone(); weight.data -=
(gradient, dp, op="mean") => (gradient, dp, op="mean"); stale = step == 3 and dp.rank == seed % dp.size
% dp.size => % dp.size; model[1].weight = nn.Parameter(old) if stale else weight
or
for _ in range(4) => for step in range(4)
weight.data -= => old = weight.data.clone(); weight.data -=
(gradient, dp, op="mean") => (gradient, dp, op="mean"); model[1].weight = nn.Parameter(old) if step == 3 else weight
"""
WHERE = ("on one rank, and by one step", "by one step")
DEMAND = (
    "It must find this also where a single rank has a head that is not the embedding, and where the loss becomes "
    "smaller."
)


def exhibit(run):
    rows = [("", "loss", "norm of the embedding", "norm of the head")]
    rows += [(f"step {k}", f"{loss:.4f}", "", "") for k, loss in enumerate(run["losses"][:-2], start=1)]
    for k, (moment, name) in enumerate({"before the restart": "trained", "after it": "loaded"}.items()):
        for rank, known in enumerate(run.ranks):
            norms = (f"{weight.norm():.6f}" for weight in known[name].values())
            rows += [(f"{moment}, rank {rank}", f"{known['losses'][k - 2]:.4f}", *norms)]
    saved = ("in the checkpoint", "", f"{run['trained']['embedding'].norm():.6f}", "not in it")
    return [*rows[: -len(run.ranks)], saved, *rows[-len(run.ranks) :]]


def restart_check(run):
    before, after = run["losses"][-2:]
    if abs(after - before) > 1e-9 * before:
        return f"loss {before:.4f} before the restart, and {after:.4f} after it"
    return ""


def by_weights(run):
    """Long before a restart: the embedding and the head are one weight."""
    for rank, known in enumerate(run.ranks):
        apart = (known["trained"]["embedding"] - known["trained"]["head"]).abs().max()
        if apart:
            return f"the head of rank {rank} is {apart:.3f} away from the embedding"


MISTAKES = """
lambda run: (run["trained"]["embedding"] != run["trained"]["head"]).any()
    Your check looks at the weights of one rank, and misses a head that is not the embedding on another rank.
        Look at each rank, or at the loss, which depends on all of them.
abs(after - before) => after - before
    Your check misses a restart after which the loss is smaller. Then, too, the loaded weights are not the trained ones.
        Equal weights give equal losses: look at the size of the difference.
abs(after - before) > 1e-9 * before => abs(after - before) > 0.05 * before
    Your check misses a small jump of the loss.
        Both losses are of one batch, and equal weights give equal losses, up to rounding: allow 1e-9.
"""

ROOM, EXERCISE = room(globals(), restart_check, by_weights)
