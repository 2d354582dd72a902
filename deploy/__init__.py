"""The composition root: command line, launcher, benches, kernel checks and the simulator.

The only code that knows two actors at once. Nothing here decides anything about requests, and
nothing outside this folder imports it.
"""
