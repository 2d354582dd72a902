"""The gateway's decisions: standard library only; no clock, I/O, logging or randomness.

``GatewayCore`` is in ``gateway.py``, what goes in and comes out in ``events.py``.
"""
