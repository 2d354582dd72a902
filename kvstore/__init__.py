"""The KV store process: cold KV payloads in host memory, their byte budget, two-phase puts.

May import ``kvstore.core`` and ``proto``. It never decides which request is a victim.
"""
