"""The SDK's decisions about one request: standard library only; no clock, I/O or randomness.

``ClientCore`` is in ``resume.py``, what goes in and comes out in ``events.py``.
"""
