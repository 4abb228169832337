"""Runs the self-test of a card in child processes, stores its result, and selects settings that
avoid the failures.

The checks are in hpu/selftest; the command is server/cli/selftest.py.
"""
