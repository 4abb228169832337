"""Tiny random checkpoints of pooling models as folders, and a worker that reads texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from slow_model import raw
from tiny_models import COMMON, FAMILIES, PAD, VOCAB_SIZE, built_once, write_tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from hpu.protocol import PREFILL, Launch, StepPlan, Text
from hpu.worker.worker import Worker

Vectors = npt.NDArray[np.float32]

ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "type_vocab_size": 2,
    "pad_token_id": PAD,
    "initializer_range": 0.15,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": {**ENCODER, "type_vocab_size": 1},
    "xlm-roberta": {**ENCODER, "type_vocab_size": 1, "pad_token_id": 1},
    "nomic_bert": ENCODER,
    "distilbert": {
        **{"vocab_size": VOCAB_SIZE, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
        **{"max_position_embeddings": 130, "pad_token_id": PAD, "initializer_range": 0.15},
    },
}


@built_once
def make_pooling(
    family: str, folder: Path | str, *, num_labels: int | None = None, **overrides: Any
) -> Path:
    """Write a float32 checkpoint of `family`, a key of ENCODERS or of tiny_models.FAMILIES, without
    a head or with a head of `num_labels` labels; returns the folder."""
    fields = {**(ENCODERS.get(family) or {**COMMON, **FAMILIES[family]}), **overrides}
    if num_labels is not None:
        fields["num_labels"] = num_labels
    config = AutoConfig.for_model(family, **fields)
    kind: Any = AutoModel if num_labels is None else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind.from_config(config).float()
        # Randomize norms and biases: with initial values of 1 and 0, a loader that mixes them up
        # would not be noticed.
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.data += 0.2 * torch.randn_like(parameter)
    folder = Path(folder)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def write_modules(
    folder: Path, *kinds: str, pooling: dict[str, Any] | None = None, **more: Any
) -> None:
    """Write the files of sentence-transformers to a checkpoint: its modules in order, the pooling
    config, and other files by name."""
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", listed)
    if "Pooling" in kinds:
        write_json(folder / f"{kinds.index('Pooling')}_Pooling" / "config.json", pooling or {})
    for name, content in more.items():
        write_json(folder / f"{name}.json", content)


class Reader:
    """A worker in this process that computes the vectors of batches of texts."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings.setdefault("scheduler", SchedulerConfig(8, 512))
        settings.setdefault("cache", CacheConfig())
        settings.setdefault("device", "cpu")
        settings.setdefault("dtype", "float32")
        self.worker = Worker(EngineConfig(str(folder), num_threads=1, **settings))
        self.ready = self.worker.start(lambda progress: None)
        self._step = 0

    def run(self, texts: Sequence[Sequence[int]], **wanted: Any) -> list[tuple[int, memoryview]]:
        """Vectors of a single launch, as in StepResult.vectors; `wanted`: fields of each Text."""
        lengths = [len(text) for text in texts]
        bucket = (len(texts), max(lengths), 0)
        launch = Launch(PREFILL, bucket, list(range(len(texts))), lengths, [False] * len(texts))
        asked = [Text(raw(list(text)), **wanted) for text in texts]
        plan = StepPlan(self._step, [launch], texts=asked)
        self._step += 1
        self.worker.submit(plan)
        return self.worker.collect().vectors

    def read(self, texts: Sequence[Sequence[int]], **wanted: Any) -> list[Vectors]:
        """Vectors of each text as an array (rows, width)."""
        return [
            np.frombuffer(data, "<f4").reshape(rows, -1) for rows, data in self.run(texts, **wanted)
        ]
