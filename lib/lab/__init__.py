"""The laboratory: instruments with which pages and tests measure the library, and compare it with what it should do.

May import all of `lib`: ...
No room may import it.
"""
