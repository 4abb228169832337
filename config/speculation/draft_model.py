"""Facts of drafting with a smaller model."""

from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.speculation.base import SpeculationMethod
from config.speculation.drafter import (
    DRAFTER_KEYS,
    DrafterFacts,
    check_decoder,
    check_vocabulary,
)


class DraftModel(DrafterFacts):
    keys = DRAFTER_KEYS
    is_whole_model = True

    def is_inferred(self, model: str) -> bool:
        return True

    def model_config(
        self, method: SpeculationMethod, folder: str, target: ModelConfig, num_ranks: int
    ) -> ModelConfig:
        model_config = read_model_config(folder)
        check_vocabulary(method, model_config, target)
        check_decoder(method, model_config)
        return model_config


METHODS = {"draft_model": DraftModel()}
