"""EngineClient: how a front end asks for tokens, over ZeroMQ or in its own process.

The launcher starts the engine for the former.
"""
