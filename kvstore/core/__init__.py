"""Pure logic of the KV store, and the vocabulary every core shares (layout, ids, messages).

Standard library only: no clock, no I/O, no logging, no threads, no global randomness.
"""
