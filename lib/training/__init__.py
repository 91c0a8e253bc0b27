"""Training a GPT from the command line: its settings, and the loop over steps, whatever the layout.

May import `lib.cost`, `lib.launch`, `lib.mesh`, `lib.trace`, `lib.data`, `lib.model`, `lib.layout`, `lib.parallel`,
`lib.parallel_model` and, to save and resume, `lib.checkpoint`.
Must never know how a step is computed.
"""
