"""Selects the PromptForm of a checkpoint: Pixtral's for Pixtral's vision tower, otherwise by
processor class, or else by model type."""

from config.errors import ConfigError
from config.kinds import Kinds
from server.multimodal.families.base import MakeForm, ProcessorFiles, PromptForm

_FORMS = Kinds[MakeForm]("server.multimodal.families", "FORMS", "processor class").all


def prompt_form(files: ProcessorFiles) -> PromptForm:
    """The PromptForm of the checkpoint with `files`. Raises ConfigError."""
    name = files.processor.get("processor_class")
    if files.vision.get("model_type") == "pixtral":
        # Checkpoints with Pixtral's vision tower may name LlavaProcessor.
        name = "PixtralProcessor"
    model_type = files.config.get("model_type")
    found = _FORMS.get(str(name)) or _FORMS.get(str(model_type))
    if found is None:
        raise ConfigError(
            f"the checkpoint has the processor {name!r} and the model type {model_type!r}, images "
            f"are supported for {', '.join(name for name in _FORMS if name.endswith('Processor'))}"
        )
    return found(files)
