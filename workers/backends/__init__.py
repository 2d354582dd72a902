"""Devices behind one interface (``base.Backend``): here the CPU, later CUDA.

A backend computes; it holds no request state and decides nothing. It may import ``kernels`` and
``workers.pool``, never the engine or ``workers.core``.
"""
