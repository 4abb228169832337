"""Images in models with recurrent states (Qwen3.5), compared with transformers' multimodal models:
log-probabilities of every prompt token, and checkpoints in their published form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_traffic import ImageRig, Prompt, text, write
from safetensors.torch import load_file, save_file
from tiny_vision_models import (
    IMAGE,
    QWEN_STATES,
    VISION_FAMILIES,
    WITH_STATES,
    generate,
    make_tiny_vision,
    prepare,
)
from worker_rig import WorkerRig

from hpu.protocol import RequestSampling

TOLERANCE = 1e-3
SCORED = RequestSampling(temperature=0.0, num_prompt_logprobs=0)


@torch.inference_mode()
def expected_scores(name: str, whole: Any, prompt: Prompt) -> np.ndarray:
    """Log-probabilities of all prompt tokens after the first, from transformers."""
    ids = torch.tensor([prompt.tokens])
    given = VISION_FAMILIES[name].joined([picture.tensors for picture in prompt.pictures])
    logits = whole(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), **given).logits
    scores = logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0].numpy()  # type: ignore[no-any-return]


def scores_of(rig: WorkerRig, prompt: Prompt, chunk: int) -> np.ndarray:
    """The scores of `expected_scores`, from a prefill in chunks."""
    images = ImageRig(rig)
    images.admit(0, prompt, sampling=SCORED)
    found = []
    while (left := len(prompt.tokens) - rig.requests[0].computed) > 0:
        rig.prefill({0: min(chunk, left)})
        for _, scores in rig.step().prompt_logprobs:
            found.append(np.frombuffer(scores.values, "<f4"))
    images.free_all()
    rig.free(0)
    # Each token's score would be followed by the scores of the k most likely tokens, but k is 0.
    return np.concatenate(found)


@pytest.mark.parametrize("name", WITH_STATES)
def test_log_probabilities_of_a_prompt_in_chunks_equal_transformers(
    name: str, tmp_path: Path
) -> None:
    whole = make_tiny_vision(name, tmp_path)
    first, second = prepare(name, whole, [0, 3])
    prompt = write(text(1, 9), (b"first", first), text(2, 4), (b"second", second), text(3, 12))
    rig = WorkerRig(tmp_path)
    try:
        # Chunks begin and end within the images.
        found = {chunk: scores_of(rig, prompt, chunk) for chunk in (100, 7, 2)}
    finally:
        rig.worker.close()

    expected = expected_scores(name, whole, prompt)
    assert len(expected) == len(prompt.tokens) - 1
    for chunk, scores in found.items():
        assert np.abs(scores - expected).max() < TOLERANCE, chunk


@pytest.mark.parametrize("name", QWEN_STATES)
def test_a_checkpoint_with_published_fields_serves_images(name: str, tmp_path: Path) -> None:
    """The vision_config has the model_type of the multimodal model and a list of layers for
    deepstack, which this tower does not read. The weights have a layer for multi-token
    prediction."""
    whole = make_tiny_vision(name, tmp_path)
    (picture,) = prepare(name, whole, [1])
    prompt = write(text(1, 5), (b"one", picture), text(2, 3))
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields["vision_config"] |= {"model_type": name, "deepstack_visual_indexes": [1]}
    fields["text_config"]["mtp_num_hidden_layers"] = 1
    file.write_text(json.dumps(fields))
    weights = tmp_path / "model.safetensors"
    mtp = {
        "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5),
        "mtp.fc.weight": torch.ones(2),
    }
    save_file({**load_file(weights), **mtp}, weights, metadata={"format": "pt"})

    rig = WorkerRig(tmp_path)
    try:
        ImageRig(rig).admit(0, prompt)
        rig.prefill({0: None})
        rig.step()
        rig.run([0], 3)
        found = rig.free(0)
    finally:
        rig.worker.close()

    assert found == generate(name, whole, prompt.tokens, [picture], 4)


@pytest.mark.parametrize("name", QWEN_STATES)
def test_a_rope_without_mrope_sections_gets_the_sections_of_the_family(
    name: str, tmp_path: Path
) -> None:
    # 32 frequencies, as in all published models.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    whole = make_tiny_vision(name, tmp_path, head_dim=256, rope_parameters=rope)
    (picture,) = prepare(name, whole, [0])
    prompt = write(text(1, 5), (b"one", picture), text(2, 9))
    rig = WorkerRig(tmp_path)
    try:
        found = scores_of(rig, prompt, 100)
    finally:
        rig.worker.close()

    assert np.abs(found - expected_scores(name, whole, prompt)).max() < TOLERANCE
