"""The controller's decisions: admission, victims, resumes, recovery. Events in, effects out.

Lengths and block counts only: no token ids, no KV, no block ids. Standard library and
``deepinfer.kvstore.core`` only; no clock, no I/O, no randomness.
"""
