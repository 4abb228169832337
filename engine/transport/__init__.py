"""Messages between server and engine, and the typed ZeroMQ channels that carry them.

Only this package imports zmq.
"""
