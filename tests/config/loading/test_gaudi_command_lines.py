"""Command lines for vLLM on Gaudi in public charts, guides and scripts are accepted unchanged.

Each row restates the flags and values of a file, with the variables of a script filled in.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from config.loading.sources import Loaded, load

CHART = (
    "--block-size 128 --dtype bfloat16 --max-model-len 33024 --gpu-memory-util {util} "
    "--max-num-seqs {seqs} --max-num-prefill-seqs 16 --num_scheduler_steps {steps} "
    "--use-padding-aware-scheduling {more} --tensor-parallel-size {cards} --model org/model "
    "--served-model-name model --port 2080"
)
"""opea-project/Enterprise-Inference, core/helm-charts/vllm: gaudi-values.yaml and
gaudi3-values.yaml with templates/deployment.yaml."""
CHART_TOOLS = (
    ("hermes", "hermes", 64, 0.98, 1),
    ("hermes", "hermes", 416, 0.99, 1),
    ("llama3_json", "llama3.1_json", 288, 0.98, 4),
    ("llama3_json", "llama3.2_json", 640, 0.98, 1),
    ("llama4_json", "llama4_json", 448, 0.98, 4),
    ("mistral", "mistral", 320, 0.97, 2),
    ("granite", "granite", 160, 0.99, 1),
)
"""Tool parser, chat template, sequences, memory share, cards."""
CHART_LINES = (
    *(
        CHART.format(
            util=util,
            seqs=seqs,
            steps=1,
            cards=cards,
            more=f"--disable-log-requests --tool-call-parser {parser} --chat-template "
            f"/workspace/vllm/examples/tool_chat_template_{template}.jinja "
            "--enable-auto-tool-choice",
        )
        for parser, template, seqs, util, cards in CHART_TOOLS
    ),
    CHART.format(util=0.98, seqs=192, steps=16, cards=4, more="--disable-log-requests"),
    CHART.format(
        util=0.98,
        seqs=128,
        steps=1,
        cards=4,
        more="--trust_remote_code --enable-expert-parallel --use-v2-block-manager "
        "--tool-call-parser llama4_json --enable-auto-tool-choice "
        """'--override-generation-config={"attn_temperature_tuning": true}'""",
    ),
    # A model with its own tuned deployment, which adds two flags.
    CHART.format(
        util=0.98, seqs=32, steps=1, cards=1, more="--trust-remote-code --tokenizer-mode slow"
    ),
    "--block-size 128 --dtype bfloat16 --max-model-len 5196 --model org/model",
)

LLM_D_LINES = (
    # llm-d/llm-d, guides/optimized-baseline/modelserver/hpu/vllm/patch-vllm.yaml, with and without
    # the two lines of distributed tracing.
    "org/model --block-size=128 --max-num-seqs=256 --max-model-len=2048 "
    "--max-num-batched-token=16000 --disable-access-log-for-endpoints=/health,/metrics,/v1/models "
    "--shutdown-timeout=30",
    "org/model --block-size=128 --max-num-seqs=256 --max-model-len=2048 "
    "--max-num-batched-token=16000 --disable-access-log-for-endpoints=/health,/metrics,/v1/models "
    "--shutdown-timeout=30 --otlp-traces-endpoint=http://otel-collector:4317 "
    "--collect-detailed-traces=all",
    # guides/pd-disaggregation/modelserver/hpu/vllm: patch-decode.yaml and patch-prefill.yaml.
    "org/model --disable-uvicorn-access-log --tensor-parallel-size=4 --enforce-eager "
    "--gpu-memory-utilization=0.9 --kv-transfer-config '"
    """{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu"}' """
    "--port=8200",
    "org/model --disable-uvicorn-access-log --tensor-parallel-size=1 --enforce-eager "
    "--gpu-memory-utilization=0.9 --kv-transfer-config '"
    """{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}' """
    "--shutdown-timeout=60",
    # guides/inference-scheduling/ms-inference-scheduling: values-hpu.yaml and values-gaudi.yaml.
    "--model org/model --block-size=128 --max-num-seqs=256 --max-seq-len-to-capture=2048 "
    "--max-model-len=2048 --max-num-batched-token=16000",
)

_NIXL = (
    """{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu","""
    """ "kv_connector_extra_config":{"backends":["UCX"]}}"""
)
_LMCACHE = (
    """{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer","kv_connector_extra_config":"""
    """ {"discard_partial_chunks": false, "lmcache_rpc_port": "producer1"}}"""
)
PLUGIN_LINES = (
    # vllm-project/vllm-gaudi, .cd/templates/template_vllm_server.sh.
    "org/model --block-size 128 --dtype bfloat16 --tensor-parallel-size 8 --download_dir /hf "
    "--max-model-len 4352 --gpu-memory-utilization 0.9 --max-num-seqs 128 "
    "--generation-config vllm --max-num-batched-tokens 8192",
    # docs/configuration: calibration, multi_node, pipeline_parallelism, inc, managing_warm-up.
    "org/model --quantization inc --kv-cache-dtype fp8_inc --tensor-parallel-size 8 "
    "--max-model-len 2048",
    "org/model --dtype bfloat16 --max-model-len  2048 --block-size 128 --max-num-seqs 32 "
    "--tensor-parallel-size 16 --distributed-executor-backend ray",
    "org/model --device hpu --tensor-parallel-size 8 --pipeline-parallel-size 2",
    "org/model --dtype bfloat16 --max-model-len  2048 --block-size 128 --max-num-seqs 32 "
    "--quantization inc --kv-cache-dtype fp8_inc --tensor-parallel-size 8",
    "org/model -tp 1 --weights-load-device cpu --max-model-len 8192",
    # docs/dev_guide/profiling, docs/getting_started/quickstart.
    "--port 8080 --model facebook/opt-125m --tensor-parallel-size 1 --max-num-seqs 128 "
    "--dtype bfloat16 --max-model-len 256",
    "--model org/model --host 0.0.0.0 --port 8000",
    # tests/full_tests/gpqa_eval/lm_eval_server.sh.
    "--model org/model --served-model-name org/model --tensor-parallel-size 8 "
    "--enable-expert-parallel --max-model-len 65536 --gpu-memory-utilization 0.90 "
    "--trust-remote-code --limit-mm-per-prompt '" + """{"image": 8}' """
    "--default-chat-template-kwargs '" + """{"thinking": true}' --port 8000""",
    # examples/nixl and examples/lmcache.
    "org/model --port 8700 --enforce-eager --max_num_batched_tokens 8192 "
    f"--gpu-memory-utilization 0.3 --tensor-parallel-size 1 --kv-transfer-config '{_NIXL}'",
    "org/model --max-num-batched-tokens 8192 --port 1100 --gpu_memory_utilization 0.80 "
    f"--disable-log-requests --enforce-eager --kv-transfer-config '{_LMCACHE}'",
)

FORK_LINES = (
    # HabanaAI/vllm-fork, internvl-scripts/server-internvl.sh.
    "--host localhost --port 12345 --block-size 128 --model org/model --revision 4ab0878e "
    "--dtype bfloat16 --tensor-parallel-size 1 --max-model-len 19456 "
    "--max-num-batched-tokens 19456 --gpu_memory_utilization 0.99 "
    "--limit-mm-per-prompt image=13 --max-num-prefill-seqs 4 --max-num-seqs 64 --split_qkv "
    "--disable-log-requests --disable-log-stats",
)

OPEA_LINES = (
    # opea-project/GenAIExamples: compose files of Gaudi.
    "--model org/model --tensor-parallel-size 1 --host 0.0.0.0 --port 80 --block-size 128 "
    "--max-num-seqs 256 --max-seq-len-to-capture 2048",
    "--model org/model --tensor-parallel-size 4 --host 0.0.0.0 --port 8000 "
    "--max-seq-len-to-capture 16384",
    "--model org/model --tensor-parallel-size 1 --host 0.0.0.0 --port 80 --chat-template "
    "examples/template_llava.jinja",
    "--model org/model --host 0.0.0.0 --port 80",
    # opea-project/GenAIInfra: helm-charts and kubeai.
    "--tensor-parallel-size 4 --max-seq-len-to-capture 16384 --enable-auto-tool-choice "
    "--tool-call-parser llama3_json --model org/model",
    "--enforce-eager --tensor-parallel-size 1 --block-size 128 --max-num-seqs 256 --model m",
    "--model=org/model --tensor-parallel-size=1 --block-size=128 --max-num-seqs=256 "
    "--max-seq-len-to-capture=2048 --max-model-len=2048 --max-num-batched-token=16000",
    "--model=org/model --load_format=mistral --config_format=mistral --tensor-parallel-size=1 "
    "--block-size=128 --max-num-seqs=512 --max-seq-len-to-capture=2048 --max-model-len=2048 "
    "--max-num-batched-token=2048 --disable-log-request",
    "--model=org/model --tensor-parallel-size=2 --block-size=128 --max-num-seqs=512 "
    "--max-model-len=32000 --max-seq-len-to-capture=32000 --max-num-batched-token=64000 "
    "--disable-log-request",
)

TUTORIAL_LINES = (
    # HabanaAI/vllm-fork, docs of the branch for Qwen: images, videos and audio.
    "org/model --port 8000 --host 127.0.0.1 --dtype bfloat16 --limit-mm-per-prompt "
    "video=5,image=5 --mm_processor_kwargs max_pixels=1003520",
    "org/model --port 8000 --host 127.0.0.1 --limit-mm-per-prompt video=5,image=5 "
    "--mm_processor_kwargs max_pixels=1003520,min_pixels=3136 --tensor-parallel-size 8 "
    "--enable-expert-parallel",
    # FP8 with the names of 2024: the compressor was called hqt before it was named inc.
    "--model org/model --device hpu --seed 2024 --dtype bfloat16 --quantization hqt "
    "--kv-cache-dtype hf8 --weights-load-device cpu",
    # max_num_seqs above the default number of tokens per step.
    "--model org/model --host 0.0.0.0 --port 80 --block-size 128 --max-num-seqs  4096 "
    "--max-seq_len-to-capture 8192 --tensor-parallel-size 4 --use-v2-block-manager",
    # Scripts of benchmarks: Llama 3.3, Granite 3, Mistral Large 3, DeepSeek R1.
    "org/model --quantization inc --kv-cache-dtype fp8_inc --tensor_parallel_size 2 "
    "--max-num-seqs 128 --dtype=bfloat16 --gpu-memory-util 0.9 --tensor-parallel-size=2 "
    "--max-model-len=131072 --block-size=128 --disable-log-requests --async_scheduling "
    "--disable-log-stats --no-enable-prefix-caching --trust_remote_code",
    "--model=org/model --port 8260 --max-num-seqs=8 --dtype=bfloat16 --gpu-memory-util 0.95 "
    "--tensor-parallel-size=8 --max-model-len=131072 --block-size=128 --async-scheduling "
    "--disable-log-stats --no-enable-prefix-caching --enable-expert-parallel "
    "--enable-auto-tool-choice --tool-call-parser mistral --max-num-batched-tokens 4096 "
    "--trust-remote-code",
    "--host 0.0.0.0 --port 8688 --block-size 128 --model org/model --device hpu --dtype bfloat16 "
    "--kv-cache-dtype fp8_inc --tensor-parallel-size 8 --trust-remote-code --max-model-len 16384 "
    "--max-num-seqs 128 --max-num-batched-tokens 16384 --use-padding-aware-scheduling "
    "--use-v2-block-manager --distributed_executor_backend ray --gpu_memory_utilization 0.85 "
    "--disable-log-requests --enable-reasoning --reasoning-parser deepseek_r1 "
    "--enable-expert-parallel",
    "--port 8080 --model org/model --tensor-parallel-size 8 --max-num-seqs 128 --dtype bfloat16 "
    "--block-size 128 --gpu-memory-util 0.9 --num-lookahead-slots 1 --use-v2-block-manager",
    # The parser that the plug-in adds.
    "org/model --enable-auto-tool-choice --tool-call-parser minimax_m3_py "
    "--reasoning-parser minimax_m3",
    "--host 0 --port 30001 --device hpu --dtype bfloat16 --quantization gptq_hpu --model m "
    "--trust-remote-code --tensor-parallel-size 1 --seed 0 --max-seq-len-to-capture 8192",
)
OPENSHIFT_LINES = (
    # Deployments of vLLM for Gaudi on OpenShift: templates of Red Hat's images.
    *(
        "--model=/mnt/models --download-dir /models-cache --device hpu --tensor-parallel-size 1 "
        "--pipeline-parallel-size 1 --dtype float16 --enable-auto-tool-choice "
        f"--tool-call-parser granite --chat-template {folder}/tool_chat_template_granite.jinja"
        for folder in ("/app", "/app/data/template", "/opt/app-root/template")
    ),
)

STACK_LINES = (
    # vllm-project/production-stack: helm/templates/deployment-vllm-multi.yaml, after `vllm serve`.
    "org/model --host 0.0.0.0 --port 8000 --enable-auto-tool-choice --tool-call-parser llama3_json "
    "--enable-chunked-prefill --no-enable-prefix-caching --max-model-len 4096 --dtype bfloat16 "
    "--tensor-parallel-size 1 --max-num-seqs 32 --gpu_memory_utilization 0.9",
    "org/model --host 0.0.0.0 --port 8000 --enable-lora --no-enable-chunked-prefill "
    "--enable-prefix-caching --max_loras 4 --kv-transfer-config "
    """'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'""",
)

LINES = (*CHART_LINES, *LLM_D_LINES, *PLUGIN_LINES, *FORK_LINES, *OPEA_LINES, *TUTORIAL_LINES)
LINES += (*OPENSHIFT_LINES, *STACK_LINES)
WITHOUT_EFFECT = {
    *("use-padding-aware-scheduling", "trust-remote-code"),
    *("use-v2-block-manager", "tokenizer-mode", "max-seq-len-to-capture", "config-format"),
    *("collect-detailed-traces", "kv-transfer-config", "weights-load-device", "disable-log-stats"),
    *("enable-reasoning", "num-lookahead-slots"),
}
"""Flags of these command lines that have no effect here."""
NOTED = re.compile(r"(--[\w-]+) (?:is read as|\S+ is a file of vLLM's image)")


def taken(line: str) -> Loaded:
    return load(shlex.split(line), environ={})


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_for_gaudi_is_accepted(line: str) -> None:
    loaded = taken(line)

    given = {
        word.lstrip("-").partition("=")[0].replace("_", "-")
        for word in shlex.split(line)
        if word.startswith("--")
    }
    ignored = {flag.partition(" ")[0].removeprefix("--") for flag in loaded.without_effect}
    assert ignored == given & WITHOUT_EFFECT
    assert all(loaded.without_effect.values())


def test_rope_flags_set_fields_of_the_config() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

    loaded = taken(f"m --rope-scaling '{json.dumps(rope)}' --rope_theta=1e6")

    assert json.loads(loaded.engine.hf_overrides) == {"rope_scaling": rope, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        (CHART_LINES[0], ["--gpu-memory-util", "--chat-template"]),
        (LLM_D_LINES[0], ["--max-num-batched-token"]),
        (OPEA_LINES[2], ["--chat-template"]),
        (OPEA_LINES[7], ["--max-num-batched-token", "--disable-log-request"]),
        (PLUGIN_LINES[0], []),
        (OPENSHIFT_LINES[0], ["--chat-template"]),
    ],
)
def test_reinterpreted_flags_are_noted(line: str, noted: list[str]) -> None:
    notes = taken(line).notes

    assert [match[1] for note in notes if (match := NOTED.match(note))] == noted
    assert len(notes) == len(noted)


@pytest.mark.parametrize(
    "folder",
    [
        *("examples", "/vllm-workspace/examples", "/workspace/vllm/examples"),
        *("/app", "/app/data/template", "/opt/app-root/template"),
    ],
)
@pytest.mark.parametrize(
    "template",
    ["tool_chat_template_hermes", "tool_chat_template_llama3.1_json", "template_llava"],
)
def test_a_chat_template_path_of_the_vllm_image_selects_the_models_template(
    folder: str, template: str
) -> None:
    path = f"{folder}/{template}.jinja"
    loaded = taken(f"m --chat-template {path} --tool-call-parser mistral")
    none = taken(f"m --chat-template {path} --tool-call-parser none")

    assert (loaded.server.chat_template, loaded.server.tool_call_parser) == (None, "auto")
    assert (none.server.chat_template, none.server.tool_call_parser) == (None, "none")
    assert loaded.notes == (
        f"--chat-template {path} is a file of vLLM's image that does not exist here: the model's "
        "own chat template is used with --tool-call-parser auto",
    )


def test_an_existing_or_unknown_chat_template_path_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = "examples/tool_chat_template_hermes.jinja"
    for path in (
        "examples/mine.jinja",
        "/templates/tool_chat_template_hermes.jinja",
        "/opt/app-root/template/mine.jinja",
    ):
        assert taken(f"m --chat-template {path}").server.chat_template == path
    (tmp_path / "examples").mkdir()
    (tmp_path / here).write_text("{{ messages }}")

    loaded = taken(f"m --chat-template {here} --tool-call-parser mistral")

    assert (loaded.server.chat_template, loaded.server.tool_call_parser) == (here, "mistral")
    assert loaded.notes == ()
