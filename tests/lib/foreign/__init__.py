"""Foreign programs: a small Llama that plain PyTorch trains in many layouts, and the mistakes that people make there.

They know nothing of this library but `lib.doctor.numbers.watch`, which looks at them: `record` of `run.py` runs a list
of cases, each into a folder of its own. Its `mistakes.py` says what should be found in each.
"""
