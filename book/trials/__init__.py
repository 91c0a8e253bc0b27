"""Instruments of the pages: naive versions of techniques, formulas that only pages need, layers that sleep, rehearsals
of schedules, virtual clusters, planted mistakes, a fit, and the kernel's count of bytes.

May import `lib`, all of it.
Only pages and tests may import it: what runs on a cluster needs none of it.
"""
