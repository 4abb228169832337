"""Cross-attention images: which images each token attends to, compared with transformers."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_traffic import ImageRig, Prompt, encoded, text, write
from paged_harness import load_decoder
from tiny_vision_models import (
    IMAGE,
    Picture,
    cross_attention_mask,
    generate,
    make_tiny_vision,
    prepare,
)
from torch.utils._python_dispatch import TorchDispatchMode
from worker_rig import WorkerRig

from config.checkpoint.facts import model_facts
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.read_config import read_model_config
from config.model.split import check_stages
from hpu.layers.metadata import cross_metadata
from hpu.model_loader.size_estimate import cross_activation_bytes, cross_tile_bytes
from hpu.models.decoder import Decoder
from hpu.ops.attention import attend_unfused
from hpu.protocol import RequestSampling
from hpu.worker.build import _estimated_activations, _fixed_bytes
from hpu.worker.card_plan import CardDemand, plan_card

TOLD = RequestSampling(temperature=0.0, num_prompt_logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mllama")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return make_tiny_vision("mllama", folder)


@pytest.fixture(scope="module")
def pictures(whole: Any) -> list[tuple[bytes, Picture]]:
    return [(b"%d" % i, item) for i, item in enumerate(prepare("mllama", whole, [0, 1, 2, 3]))]


@torch.inference_mode()
def expected(whole: Any, prompt: Prompt) -> np.ndarray:
    """(tokens - 1) log-probabilities of all prompt tokens after the first."""
    given: dict[str, Any] = {}
    if prompt.pictures:
        names = prompt.pictures[0].tensors
        given = {
            n: torch.cat([picture.tensors[n] for picture in prompt.pictures], dim=1) for n in names
        }
        given["cross_attention_mask"] = cross_attention_mask(prompt.tokens, prompt.pictures)
    ids = torch.tensor([prompt.tokens])
    logits = whole(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
    # The image token has no logit.
    known = torch.log_softmax(logits, dim=-1)
    targets = ids[0, 1:].clamp_max(known.shape[-1] - 1)
    return known[:-1].gather(1, targets.unsqueeze(1)).squeeze(1).numpy()


def told(rig: WorkerRig, prompt: Prompt, chunk: int | None = None) -> np.ndarray:
    images = ImageRig(rig)
    images.admit(0, prompt, sampling=TOLD)
    pieces = []
    while (left := len(prompt.tokens) - rig.requests[0].computed) > 0:
        rig.prefill({0: left if chunk is None else min(chunk, left)})
        pieces += [prompt_logprob for _, prompt_logprob in rig.step().prompt_logprobs]
    images.free_all()
    rig.free(0)
    return np.concatenate([np.frombuffer(piece.values, "<f4") for piece in pieces])


def is_text(prompt: Prompt) -> np.ndarray:
    return np.array(prompt.tokens[1:]) != IMAGE


def test_images_in_bfloat16_agree_with_transformers(
    folder: Path, whole: Any, pictures: list[tuple[bytes, Picture]]
) -> None:
    """In bfloat16, the CPU back end uses the compiled library, which lacks cross-attention
    layers."""
    prompt = write(text(1, 7), pictures[1], text(2, 6))
    rig = WorkerRig(folder, dtype="bfloat16", images_per_request=6)
    try:
        found = told(rig, prompt)
    finally:
        rig.worker.close()

    kept = is_text(prompt)
    np.testing.assert_allclose(found[kept], expected(whole, prompt)[kept], atol=0.1)


@pytest.mark.parametrize("chunk", [None, 5])
def test_each_token_attends_to_the_same_images_as_in_transformers(
    chunk: int | None, folder: Path, whole: Any, pictures: list[tuple[bytes, Picture]]
) -> None:
    item, two, three, four = pictures
    prompts = [
        write(text(1, 9)),
        write(item, text(2, 6)),
        write(text(1, 7), two, text(2, 6)),
        # Adjacent images are attended to together, until the next image follows.
        write(text(1, 4), item, two, text(3, 5), three, four, item, text(4, 6), two, text(5, 3)),
        write(text(6, 5), three),
    ]
    rig = WorkerRig(folder, images_per_request=6)
    try:
        found = [told(rig, prompt, chunk) for prompt in prompts]
    finally:
        rig.worker.close()

    for prompt, values in zip(prompts, found, strict=True):
        kept = is_text(prompt)
        np.testing.assert_allclose(values[kept], expected(whole, prompt)[kept], atol=2e-5)
        assert (values[~kept] == -np.inf).all()
    # The log-probabilities differ if the images differ, even for tokens before an image.
    other = write(text(1, 7), three, text(2, 6))
    assert np.abs(expected(whole, other) - expected(whole, prompts[2]))[:6].max() > 1e-3


def test_a_non_finite_image_does_not_affect_the_padding_of_other_requests(
    folder: Path, whole: Any
) -> None:
    layer = load_decoder(folder).cross_attentions[0]
    heads = layer.kv_proj.out_features // (2 * layer.shape.head_dim)
    keys, values = torch.zeros(2, 3, 4, heads, layer.shape.head_dim).unbind(0)
    layer.bind(keys, values)
    embeddings = torch.ones(3, 4, layer.q_proj.in_features)
    embeddings[:2] = torch.nan

    # A launch on several cards repeats an image as padding.
    layer.write(torch.tensor([0, 2, 1]), embeddings)

    for cache in (keys, values):
        assert cache[0].isnan().all()
        assert cache[1].isfinite().all()
        assert not cache[2].any()


def test_a_request_with_more_tiles_than_launches_have_is_an_error(
    folder: Path, pictures: list[tuple[bytes, Picture]]
) -> None:
    rig = WorkerRig(folder, max_num_seqs=2)
    try:
        ImageRig(rig).admit(0, write(pictures[0], text(1, 3), pictures[1]))
        rig.prefill({0: None})

        with pytest.raises(RuntimeError, match="has 8 tiles of images, a launch takes at most 4"):
            rig.step()
    finally:
        rig.worker.close()


def test_an_image_placed_without_an_image_token_is_an_error(
    folder: Path, pictures: list[tuple[bytes, Picture]]
) -> None:
    rig = WorkerRig(folder)
    try:
        prompt = write(text(1, 3), pictures[0])
        rig.encode(encoded(*pictures[0]))
        moved = replace(prompt, tokens=[*prompt.tokens[:-1], 5])
        rig.admit(0, moved.tokens, images=moved.placements)
        rig.prefill({0: None})

        with pytest.raises(RuntimeError, match="an image has 1 tokens from 3 on"):
            rig.step()
    finally:
        rig.worker.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_slept_gives_the_same_log_probabilities(
    level: int, folder: Path, whole: Any, pictures: list[tuple[bytes, Picture]]
) -> None:
    prompt = write(text(1, 7), pictures[1], text(2, 6))
    rig = WorkerRig(folder)
    try:
        before = told(rig, prompt)
        rig.step()
        before_sleep = layers(rig)
        assert all(layer._keys.numel() for layer in before_sleep)
        rig.sleep(level)
        assert all(not layer._keys.numel() for layer in before_sleep)
        rig.worker.wake_up(lambda progress: None)
        after = told(rig, prompt)
    finally:
        rig.worker.close()

    assert np.array_equal(before, after)


def layers(rig: WorkerRig) -> list[Any]:
    loaded = rig.worker.loaded
    return [] if loaded is None else loaded.model.cross_attentions  # type: ignore[union-attr]


def test_without_its_tower_the_model_serves_texts(
    folder: Path, whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = json.loads((folder / "config.json").read_text())
    del fields["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    tokens = text(3, 12)
    rig = WorkerRig(tmp_path)
    try:
        assert rig.ready.encoder_cache_tokens == rig.ready.request_tiles == 0
        rig.admit(0, tokens)
        rig.prefill({0: None})
        rig.step()
        rig.run([0], 5)
        found = rig.free(0)
    finally:
        rig.worker.close()

    assert found == generate("mllama", whole, tokens, [], 6)


def test_pipeline_stages_are_refused(folder: Path, whole: Any) -> None:
    facts = read_model_config(str(folder))

    with pytest.raises(ConfigError, match="has layers that read images, which only the first of 2"):
        check_stages(facts, 2)
    check_stages(facts, 1)


def test_an_invalid_cross_attention_layer_is_refused(
    folder: Path, whole: Any, tmp_path: Path
) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["cross_attention_layers"] = [1, 9]
    (tmp_path / "config.json").write_text(json.dumps(fields))

    with pytest.raises(ConfigError, match="each must be an integer from 0 to 3"):
        decoder_spec(read_model_config(str(tmp_path)))


@pytest.mark.parametrize("images_per_request", [1, 3])
def test_the_plan_counts_the_cache_of_images(
    images_per_request: int, folder: Path, whole: Any
) -> None:
    rig = WorkerRig(folder, max_num_seqs=3, images_per_request=images_per_request)
    try:
        loaded = rig.worker.loaded
        assert loaded is not None
        images = rig.worker.serving.components.images
        assert images is not None
        # Keys and values of 4 tiles per image and for padding, in 2 layers with 2 heads of 8.
        tiles = 3 * images_per_request * 4
        tile = 2 * 2 * 17 * 2 * 8 * 4
        assert images.num_bytes == (tiles + 1) * tile
        assert cross_tile_bytes(loaded.model_config, num_cards=1, width=4) == tile
        assert _fixed_bytes(loaded) == images.num_bytes
    finally:
        rig.worker.close()


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # theirs
    """Tracks the memory of tensors that operators create, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or not size:
            return
        self._known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


@pytest.mark.parametrize(("rows", "length"), [(1, 256), (48, 1)], ids=["prefill", "decode"])
def test_the_estimate_of_a_launch_is_close_to_the_memory_of_a_layer(
    rows: int, length: int, whole: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate assumes separate products and softmax, as devices run them."""
    monkeypatch.setattr("hpu.layers.cross_attention.attend", attend_unfused)
    rig = WorkerRig(folder, max_num_seqs=3, images_per_request=3)
    try:
        loaded = rig.worker.loaded
        assert loaded is not None and isinstance(loaded.model, Decoder)
        layer = loaded.model.cross_attentions[0]
        tiles = torch.zeros((rows, 12), dtype=torch.int64)
        spans = torch.tensor([0, 12]).view(2, 1, 1).expand(2, rows, length)
        hidden = torch.randn(rows, length, loaded.model_config.hidden_size)
        estimated = cross_activation_bytes(
            loaded.model_config,
            num_cards=1,
            width=4,
            num_tokens=rows * length if length > 1 else 0,
            num_seqs=rows if length == 1 else 0,
            num_prompts=rows,
            images_per_request=3,
        )

        with torch.inference_mode(), LiveBytes() as measured:
            cross = cross_metadata(tiles, spans, embeddings_per_tile=17)
            layer(hidden, None, SimpleNamespace(cross=cross))

        # Queries and outputs take this memory; other layers have them, too.
        other = 4 * rows * length * (4 * loaded.model_config.hidden_size)
        assert measured.peak - other <= estimated <= 1.1 * measured.peak
    finally:
        rig.worker.close()


def test_the_estimate_of_launches_without_padding_counts_a_prompt_of_every_request(
    folder: Path, whole: Any
) -> None:
    rig = WorkerRig(folder, max_num_seqs=8)
    try:
        loaded = rig.worker.loaded
        assert loaded is not None and not loaded.pads
        scheduler = replace(loaded.config.scheduler, max_prefill_batch=8)
        same = replace(loaded, config=replace(loaded.config, scheduler=scheduler))

        assert _estimated_activations(loaded) == _estimated_activations(same)
    finally:
        rig.worker.close()


def test_a_plan_counts_the_memory_of_cross_attention(folder: Path, whole: Any) -> None:
    facts = model_facts(str(folder))
    text = replace(facts, vision=None)
    settings: dict[str, Any] = {
        "device": "gaudi2", "num_cards": 1, "width": 2, "kv_width": 2, "max_model_len": 512,
        "max_num_seqs": 4, "max_num_batched_tokens": 128, "block_size": 128, "utilization": 0.9,
        "graph_reserved": 0.4, "cross_images": 2, "max_prefill_batch": 1,
    }  # fmt: skip

    with_images, without = (plan_card(item, CardDemand(**settings)) for item in (facts, text))

    seen = 2 * 4 * 17
    assert with_images.activation_bytes - without.activation_bytes == (
        # Scores of 4 heads plus a mask; keys and values of 2 heads of 8.
        128 * 4 * seen * (1 + 3 * 4) + seen * 2 * 2 * 8 * 2
    )
