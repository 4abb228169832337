"""EngineCore: one step after the other, and the state of each request.

The loop feeds it from an inbox and sends its messages.
"""
