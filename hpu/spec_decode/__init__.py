"""Speculative decoding in the worker: a drafter of drafters/ proposes tokens; host.py or device.py
verifies them. hpu/worker/drafting.py builds these parts."""
