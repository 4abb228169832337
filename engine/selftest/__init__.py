"""Runs the self-test of a card in child processes, stores its result, and selects settings by it.
The checks are in hpu/selftest; the command is server/cli/selftest.py.
"""
