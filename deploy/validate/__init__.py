"""``deepinfer validate-kernels``: every GPU kernel against float64, on inputs chosen to hurt.

``*_cases`` make inputs and hold outputs to the accuracy rules; ``suite`` lists them, ``run`` goes
through the list on this card. Tests use the same cases in the emulator.
"""
