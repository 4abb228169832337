"""What drafts with a model or a head: its launches in the host's memory and on a device, hidden
states of the target that it reads, and inputs of decodes whose rows the device computes. Not which
tokens are drafted and accepted (hpu/spec_decode)."""
