"""EngineCore: one step after the other.

The loop feeds it from an inbox and sends its messages; engine_process is a process around it.
"""
