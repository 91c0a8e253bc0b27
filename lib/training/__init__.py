"""Training a GPT from the command line: its settings, and the loop over steps, whatever the layout.

May import `lib.cost`, `lib.launch`, `lib.mesh`, `lib.comm`, `lib.trace`, `lib.text`, `lib.data`, `lib.model`,
`lib.moe`, `lib.layout`, `lib.parallel`, `lib.parallel_model` and, to save, resume and stop, `lib.checkpoint`.
Must never know how a step is computed.
"""
