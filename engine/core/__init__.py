"""EngineCore: schedules, submits and collects steps.

EngineLoop feeds it from an inbox and sends its messages; engine_process runs the loop as a process.
"""
