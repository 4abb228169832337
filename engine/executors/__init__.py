"""Executors: how the engine reaches its workers.

base.py is the protocol, select.py turns a name into a class.
"""
