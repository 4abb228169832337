"""Detects checkpoints whose output head is a copy of the embedding."""

from pathlib import Path

from config.checkpoint.safetensors_files import StoredTensor, read_header, weight_files
from config.checkpoint.shapes import weight_map_of
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def check_tied_head(facts: ModelConfig) -> None:
    """Raise ConfigError if config.json of the folder `facts.path` has `tie_word_embeddings` but the
    files have a head that differs from the embedding in sampled bytes: such a checkpoint was
    trained with an untied head. Reads at most 512 KiB."""
    weight_map = weight_map_of(facts) if facts.encoder is None else None
    if weight_map is None or not facts.tie_word_embeddings:
        return
    spec = decoder_spec(facts, has_head=True)
    head = f"{spec.names.get('lm_head', 'lm_head')}.weight"
    embedding = next(entry.name for entry in weight_map.entries() if entry.parameter == _EMBEDDING)
    found = {
        name: (file, stored)
        for file in weight_files(Path(facts.path))
        for stored in read_header(file)
        if (name := weight_map.map_name(stored.name)) in (head, embedding)
    }
    if len(found) == 2 and not _may_be_equal(found[head], found[embedding]):
        raise ConfigError(
            f"tie_word_embeddings in {Path(facts.path, 'config.json')} is true, and {head} in "
            f"{found[head][0]} differs from {embedding}: one of them is wrong"
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
