"""The seeded simulator: the five production cores in one process, under faults.

It carries messages, performs effects as an honest environment would, breaks things, and judges
what clients are told. It may hold no protocol logic of its own: what a core should decide is
decided by that core, or the simulation proves nothing.
"""
