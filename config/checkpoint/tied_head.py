"""Detects checkpoints that declare a tied output head but store a different head."""

from pathlib import Path

from config.checkpoint.safetensors_files import StoredTensor, read_header, weight_files
from config.checkpoint.shapes import weight_map_of
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def check_tied_head(model_config: ModelConfig) -> None:
    """Raise ConfigError if a built-in decoder ties the output head to the embedding, but the files
    in `model_config.path` have a head of another shape or, with the same dtype, with other sampled
    values: the checkpoint was probably trained with an untied head. Reads the headers of all files,
    and about 512 KiB of tensor data at most."""
    weight_map = None if model_config.is_encoder else weight_map_of(model_config)
    if weight_map is None or not model_config.tie_word_embeddings:
        return
    spec = decoder_spec(model_config, has_head=True)
    head = f"{spec.names.get('lm_head', 'lm_head')}.weight"
    embedding = next(entry.name for entry in weight_map.entries() if entry.parameter == _EMBEDDING)
    found = {
        name: (file, stored)
        for file in weight_files(Path(model_config.path))
        for stored in read_header(file)
        if (name := weight_map.map_name(stored.name)) in (head, embedding)
    }
    if len(found) == 2 and not _may_be_equal(found[head], found[embedding]):
        raise ConfigError(
            f"the model of {Path(model_config.path, 'config.json')} ties the head to the embedding "
            f"(tie_word_embeddings, by default or in the file), and {head} in {found[head][0]} "
            f"differs from {embedding}: they must be equal, or tie_word_embeddings must be set to "
            "false"
        )


def _may_be_equal(entry: tuple[Path, StoredTensor], other: tuple[Path, StoredTensor]) -> bool:
    """Whether samples of two tensors are equal. Tensors of the same shape and different dtypes are
    not compared and count as equal."""
    if entry[1].shape != other[1].shape:
        return False
    if entry[1].dtype != other[1].dtype:
        return True
    num_bytes = entry[1].num_bytes
    step = max(num_bytes // _NUM_SAMPLES, 1)
    with entry[0].open("rb") as first, other[0].open("rb") as second:
        for position in range(0, num_bytes, step):
            size = min(_SAMPLE_BYTES, step, num_bytes - position)
            first.seek(entry[1].offset + position)
            second.seek(other[1].offset + position)
            if first.read(size) != second.read(size):
                return False
    return True
