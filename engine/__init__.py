"""The engine: scheduling, KV blocks, prefix cache and grammars over token ids; its clients, its
executors, and the reports of the command line.

No HTTP and no tensors. Request and StepStats are defined here because several folders use
them.
"""
