"""The engine process: scheduling, KV blocks, prefix cache and grammars over token ids.

No text, no HTTP and no tensors. Request and StepStats are defined here because several folders use
them.
"""
