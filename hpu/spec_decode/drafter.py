"""Drafter: how a draft method proposes tokens. ModelDrafter and its subclasses use a draft model or
a draft head."""

from collections.abc import Callable
from dataclasses import replace

import torch

from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig
from config.speculation.base import DRAFT_METHODS, SpeculationMethod
from config.speculation.drafter import HeadSizes, HiddenHeadFacts, facts_of
from hpu.backends.base import Backend
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.spec_decode.base import Proposer
from hpu.spec_decode.device_drafter import (
    DeviceHeadDrafter,
    DeviceHiddenHeadDrafter,
    DeviceModelDrafter,
)
from hpu.spec_decode.device_search import KeptDrafts, TextSearch
from hpu.spec_decode.draft_head import LAST_LAYER, DraftHead
from hpu.spec_decode.draft_model import DraftLauncher, DraftModelProposer
from hpu.spec_decode.draft_runner import DraftRunner, HeadRunner, HiddenHeadRunner
from hpu.spec_decode.hidden_heads import HeadLauncher, HiddenHead, HiddenHeadProposer


class Drafter:
    """How a draft method proposes tokens. This base class: a method that drafts on the host
    only."""

    def proposer(self, method: SpeculationMethod, launcher: object) -> Proposer:
        """Proposer on a device that shares memory with the host. `launcher`: runs the method's
        draft model or head, if any."""
        raise NotImplementedError

    def search(
        self, method: SpeculationMethod, backend: Backend, *, max_num_reqs: int, max_model_len: int
    ) -> TextSearch:
        """Source of drafts on a device with its own memory. Raises ConfigError if the method drafts
        on the host only."""
        raise ConfigError(
            f"--speculative-config names the method {method.method}, which drafts on cpu only, and "
            f"the device is {backend.name}: use another method"
        )


class ModelDrafter(Drafter):
    """Drafts with a draft model. The subclasses draft with a head."""

    runner: type[DraftRunner] = DraftRunner
    """Runner of the model on a device that shares memory with the host."""
    device_drafter: type[DeviceModelDrafter] = DeviceModelDrafter
    """Runner of the model on a device with its own memory."""
    reads_hidden = False
    """See DraftModelProposer."""

    def proposer(self, method: SpeculationMethod, launcher: object) -> Proposer:
        assert isinstance(launcher, DraftLauncher), "the draft model is loaded"
        return DraftModelProposer(launcher, reads_hidden=self.reads_hidden)

    def search(
        self, method: SpeculationMethod, backend: Backend, *, max_num_reqs: int, max_model_len: int
    ) -> TextSearch:
        return KeptDrafts(backend, max_num_reqs=max_num_reqs, max_drafts=method.max_drafts)

    def make_head(
        self,
        method: SpeculationMethod,
        folder: str,
        model_config: ModelConfig,
        target: ModelConfig,
        build: ModelBuild,
    ) -> DraftHead | HiddenHead:
        """This rank's shard of the head in `folder` for `target`, with empty parameters. Raises
        ConfigError for a head that is not supported."""
        raise NotImplementedError


class HeadDrafter(ModelDrafter):
    """Drafts with a head that has its own KV cache and reads the target's hidden states."""

    runner = HeadRunner
    device_drafter = DeviceHeadDrafter
    reads_hidden = True

    def __init__(self, head: Callable[[Decoder, ModelConfig, WeightMap], DraftHead]) -> None:
        """`head`: makes the head from a Decoder with its last layer only, the target's ModelConfig,
        and the weight map of the method's facts."""
        self._head = head

    def make_head(
        self,
        method: SpeculationMethod,
        folder: str,
        model_config: ModelConfig,
        target: ModelConfig,
        build: ModelBuild,
    ) -> DraftHead:
        own = replace(build, stage=LAST_LAYER)
        decoder = Decoder(model_config, decoder_spec(model_config), own, has_head=False)
        weight_map = facts_of(method).weights(method, folder, model_config, target)
        return self._head(decoder, target, weight_map)


class HiddenHeadDrafter(ModelDrafter):
    """Drafts with a head that reads a single hidden state of the target and has no KV cache."""

    runner = HiddenHeadRunner
    device_drafter = DeviceHiddenHeadDrafter

    def __init__(
        self,
        head: Callable[[ModelConfig, HeadSizes, WeightMap, torch.dtype, torch.device], HiddenHead],
    ) -> None:
        """`head`: makes the head from the ModelConfig of the target, the sizes and the weight map
        of the method's facts, the dtype and the device."""
        self._head = head

    def proposer(self, method: SpeculationMethod, launcher: object) -> Proposer:
        assert isinstance(launcher, HeadLauncher), "the head is loaded"
        return HiddenHeadProposer(launcher)

    def make_head(
        self,
        method: SpeculationMethod,
        folder: str,
        model_config: ModelConfig,
        target: ModelConfig,
        build: ModelBuild,
    ) -> HiddenHead:
        facts = facts_of(method)
        assert isinstance(facts, HiddenHeadFacts)
        sizes = facts.sizes(method, folder, target)
        return self._head(target, sizes, facts.weight_map(sizes), build.dtype, build.device)


def select_drafter(method: SpeculationMethod) -> Drafter:
    """Drafter for `method`. Imports only its file in drafters/."""
    drafter: Drafter = DRAFT_METHODS.counterpart(
        method.method, "hpu.spec_decode.drafters", "DRAFTERS"
    )
    return drafter


def select_model_drafter(method: SpeculationMethod) -> ModelDrafter:
    """Drafter for a `method` with a draft model or a draft head."""
    drafter = select_drafter(method)
    assert isinstance(drafter, ModelDrafter), f"the method {method.method} has a drafter"
    return drafter


def select_proposer(method: SpeculationMethod, launcher: object = None) -> Proposer:
    """Proposer for `method` on the host. `launcher`: runs the method's draft model or head, if
    any."""
    return select_drafter(method).proposer(method, launcher)
