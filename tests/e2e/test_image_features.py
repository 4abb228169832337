"""Images with adapters, pipeline stages, grammars, several choices, and the other APIs."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import MLP, merge, write_adapter
from live import LiveServer, running
from PIL import Image
from tiny_vision import clip, gif_bytes, image_bytes, make_tiny_vision, picture

from gaudiserve import LLM, LoRARequest, SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "block_size": 16,
    "max_num_seqs": 4,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PICTURES = [picture(60, 40), picture(40, 60, seed=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("llava", tmp_path_factory.mktemp("llava") / "llava")


def prompt(*pictures: Image.Image) -> dict[str, Any]:
    marks = "<image>" * len(pictures)
    return {"prompt": f"{marks} what?", "multi_modal_data": {"image": list(pictures)}}


def tokens_of(llm: LLM, prompts: list[Any], **options: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_text_model_adapter_is_applied_after_images(folder: Path, tmp_path: Path) -> None:
    # The tower has no modules with these names.
    adapter = write_adapter(tmp_path / "adapter", folder, targets=MLP)
    whole = merge(tmp_path / "merged", folder, adapter)
    prompts = [prompt(PICTURES[0]), prompt(*PICTURES), "text alone"]
    with LLM(str(whole), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts)
    with LLM(str(folder), **OPTIONS, enable_lora=True, lora_modules=[f"it={adapter}"]) as llm:
        plain = tokens_of(llm, prompts)
        found = tokens_of(llm, prompts, lora_request=[LoRARequest("it", 1)] * 3)

    assert found == expected
    assert plain != found


def test_phi_4_uses_its_built_in_adapter_for_prompts_with_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_vision("phi4_multimodal", tmp_path / "phi")
    # Only the layers' projections: parts of the audio tower have the same names.
    pattern = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    targets = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    adapter = write_adapter(folder / "vision-lora", folder, targets=targets, target_modules=pattern)
    whole = merge(tmp_path / "merged", folder, adapter)
    prompts = [prompt(PICTURES[0]), "text alone"]
    for changed in prompts[:1]:
        changed["prompt"] = changed["prompt"].replace("<image>", "<|image|>")
    with LLM(str(whole), **OPTIONS) as llm:
        adapted = tokens_of(llm, prompts)
    with LLM(str(folder), **OPTIONS) as llm:
        plain = tokens_of(llm, prompts)
    assert f"image adapter of the checkpoint, {adapter}" in caplog.text

    options = {"enable_lora": True, "default_mm_loras": json.dumps({"image": str(adapter)})}
    with LLM(str(folder), **OPTIONS, **options) as llm:
        found = tokens_of(llm, prompts)
        asked = tokens_of(llm, prompts, lora_request=[LoRARequest("image", 1)] * 2)

    assert found == [adapted[0], plain[1]]
    assert asked == adapted
    assert plain[0] != adapted[0] and plain[1] != adapted[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_pipeline_stages_give_the_same_tokens_for_images_and_videos(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_vision(family, tmp_path)
    prompts: list[Any] = [prompt(*PICTURES), "text alone"]
    if family == "qwen2_vl":
        pad = "<|vision_start|><|image_pad|><|vision_end|>"
        data = {"image": PICTURES[0], "video": clip(56, 56, 6)}
        text = f"a {pad} b {pad.replace('image', 'video')} c"
        prompts = [{"prompt": text, "multi_modal_data": data}, "text alone"]
    with LLM(str(folder), **OPTIONS) as llm:
        expected = tokens_of(llm, prompts)

    with LLM(str(folder), **OPTIONS, pipeline_parallel_size=2) as llm:
        found = tokens_of(llm, prompts)

    assert found == expected


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("qwen") / "qwen2_vl")
    flags = ("--served-model-name=tiny", "--dtype=float32", "--max-model-len=512")
    with running(str(folder), tmp_path_factory.mktemp("log") / "log", *flags) as server:
        yield server


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


IMAGES = [url(image_bytes(picture)) for picture in PICTURES]
CONTENT: list[dict[str, Any]] = [
    *({"type": "image_url", "image_url": {"url": image}} for image in IMAGES),
    {"type": "text", "text": "what?"},
]


def ask(live: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answer = live.ask(path, {"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_a_grammar_is_enforced_after_images_and_a_video(live: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"it": {"enum": ["cat", "dog"]}},
        "required": ["it"],
        "additionalProperties": False,
    }
    video = {
        "type": "video_url",
        "video_url": {"url": url(gif_bytes(clip(56, 56, 4)), "image/gif")},
    }
    answer = ask(
        live,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [*CONTENT, video]}],
        max_tokens=60,
        n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )

    for choice in answer["choices"]:
        assert json.loads(choice["message"]["content"])["it"] in ("cat", "dog")


def test_choices_with_images_and_a_seed_are_reproducible(live: LiveServer) -> None:
    body = {
        "messages": [{"role": "user", "content": CONTENT}],
        "temperature": 1.0,
        "seed": 5,
        "n": 3,
        "max_tokens": 6,
    }
    first, second = (ask(live, "/v1/chat/completions", **body)["choices"] for _ in range(2))

    texts = [choice["message"]["content"] for choice in first]
    assert texts == [choice["message"]["content"] for choice in second]
    assert len(set(texts)) > 1


def test_all_apis_give_the_same_answer_and_usage_for_several_images(live: LiveServer) -> None:
    chat = ask(
        live,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": CONTENT}],
        max_tokens=6,
    )
    parts = [{"type": "input_image", "image_url": image, "detail": "auto"} for image in IMAGES]
    response = ask(
        live,
        "/v1/responses",
        input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": "what?"}]}],
        max_output_tokens=6,
    )
    blocks = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": image.partition(",")[2],
            },
        }
        for image in IMAGES
    ]
    message = ask(
        live,
        "/v1/messages",
        messages=[{"role": "user", "content": [*blocks, {"type": "text", "text": "what?"}]}],
        max_tokens=6,
    )

    counts = {
        chat["usage"]["prompt_tokens"],
        response["usage"]["input_tokens"],
        message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"],
    }
    texts = {
        chat["choices"][0]["message"]["content"],
        response["output"][0]["content"][0]["text"],
        message["content"][0]["text"],
    }
    assert (len(counts), len(texts)) == (1, 1)


def test_images_of_system_assistant_and_tool_turns_affect_the_output(live: LiveServer) -> None:
    """Images in the turns of a system, an assistant and a tool, as this template renders them."""

    def told(pictures: list[str]) -> Any:
        image = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return ask(
            live,
            "/v1/chat/completions",
            messages=[
                {"role": "system", "content": [image[0]]},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [image[1]], "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [image[2]]},
            ],
            max_tokens=1,
            logprobs=True,
        )["choices"][0]["logprobs"]["content"][0]["logprob"]

    own, other = IMAGES
    values = {told(list(three)) for three in ([own] * 3, [other, own, own], [own, other, own],
                                              [own, own, other])}  # fmt: skip
    assert len(values) == 4
