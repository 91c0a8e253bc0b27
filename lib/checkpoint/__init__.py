"""A training run on disk: saved under one layout, loaded under any other, and complete or not there at all.

May import `lib.model`, `lib.mesh`, `lib.comm`, `lib.launch`, `lib.placement`, `lib.layout`, `lib.parallel` and
`lib.train_config`.
Must never know how a step is made: it sees pieces of parameters, by their serial names, and a number of steps.
"""
