"""The laboratory: instruments with which pages and tests measure the library, and compare it with what it should do.

May import `lib`, all of it; IPython only in `claims`, when a claim is shown.
Only `lib.train` may import it, for `--certify` and `--profile`.
"""
