"""Ranks that torchrun started, on one machine or on several: how they meet, and how they watch each other.

May import `lib.runtime` and `lib.mesh`; only `init` imports torch. Must never know a layer, or what is trained.
"""
