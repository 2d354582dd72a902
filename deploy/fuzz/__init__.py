"""Fuzzers: hostile bytes for every decoder, and hostile calls for every RPC handler.

``deepinfer fuzz`` runs them; tests run a few thousand cases of each, and again every input that has
ever broken something (``tests/corpus``). Here lives what makes inputs and what they are given to;
nothing here opens a socket or starts a cluster.
"""
