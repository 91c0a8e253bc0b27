"""Configurations of other programs: a model as Hugging Face writes it, and a run as six frameworks are asked for it.
`python -m book.explain train.sh --gpus 64` says flag by flag what a rank holds, sends and waits for.

May import `lib.planner`, `lib.cost`, `lib.layout`.
Must never be known by the library, which has one name for each thing.
"""
