"""Messages between server and engine and between engines, and the typed ZeroMQ channels that carry
messages.

Only this package imports zmq.
"""
