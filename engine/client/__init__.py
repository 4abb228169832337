"""EngineClient: interface through which a front end requests tokens, from an engine in another
process (over ZeroMQ) or in the front end's process.

The launcher starts engine processes.
"""
