"""Pure logic of a worker: its blocks, its batch, its swaps, and who it may speak for.

Standard library and ``kvstore.core`` only: no clock, no I/O, no logging, no threads, no torch.
Block ids, never KV bytes; token ids, never text.
"""
