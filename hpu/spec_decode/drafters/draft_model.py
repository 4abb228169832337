"""Drafting with a smaller model."""

from hpu.spec_decode.drafter import ModelDrafter

DRAFTERS = {"draft_model": ModelDrafter()}
