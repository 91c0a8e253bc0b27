"""Context parallelism: every rank has some tokens of each sequence, and attention reaches those of all ranks.

May import `lib.mesh`, `lib.comm`, `lib.cost`, `lib.conjugate`, `lib.masks`, `lib.documents`, `lib.model`, `lib.moe`,
and of `lib.tensor_parallel` two that know what is custom in a model: `custom_layers` and `tokenwise`.
Must never know the other techniques: it sees its own group, and heads that may be some of all.
"""
