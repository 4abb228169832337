"""Executor: how the engine reaches its workers. Plans go in, results come out, in order.

base.py is the protocol, select.py turns a name into a class.
"""
