"""Experiments that measure the running system; each writes JSON and a plot to docs/results.

What stands in a result file was written by the program that measured it, with the command, the
versions, the device and the date beside it.
"""
