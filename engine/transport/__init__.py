"""Messages between server and engine, and the typed ZeroMQ channels that carry them.

The only package that imports zmq.
"""
