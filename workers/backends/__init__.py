"""Devices behind one interface (``base.Backend``): the CPU. A card has ``workers.gpu`` instead.

A backend computes; it holds no request state and decides nothing. It may import ``kernels`` and
``workers.pool``, never the engine or ``workers.core``.
"""
