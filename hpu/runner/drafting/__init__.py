"""What drafts with a model or a head: its launches in the host's memory and on a device, and the
hidden states of the target that it reads. Not which tokens are drafted and accepted
(hpu/spec_decode), nor the inputs of the launches that verify them (hpu/runner/draft_buffers.py)."""
