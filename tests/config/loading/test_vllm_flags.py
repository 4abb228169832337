"""config/loading/vllm_flags.py: command lines of vLLM, as users type them."""

import json
import logging
import re
import shlex

import pytest

from config.errors import ConfigError
from config.loading.flags import FLAGS
from config.loading.parser import server_parser
from config.loading.reference import DOCS
from config.loading.sources import from_keywords, load
from config.loading.vendor_variables import vendor_variables
from config.loading.vllm_flags import ABSENT, ACCEPTED, SHORT_FORMS, absence
from config.loading.vllm_spelling import FIELD_FLAGS
from server.cli import main as cli

VLLM = """
    additional-config aggregate-engine-logging all2all-backend allow-credentials
    allowed-headers allowed-local-media-path allowed-media-domains allowed-methods
    allowed-origins api-key api-server-count async-scheduling block-size calculate-kv-scales
    chat-template chat-template-content-format code-revision collect-detailed-traces
    compilation-config config config-format convert cpu-offload-gb cuda-graph-sizes
    cudagraph-capture-sizes data-parallel-address data-parallel-backend data-parallel-hybrid-lb
    data-parallel-rank data-parallel-rpc-port data-parallel-size data-parallel-size-local
    data-parallel-start-rank dbo-decode-token-threshold dbo-prefill-token-threshold
    decode-context-parallel-size default-chat-template-kwargs default-mm-loras device
    disable-access-log-for-endpoints disable-async-output-proc disable-cascade-attn
    disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs
    disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-log-requests
    disable-log-stats disable-logprobs-during-spec-decoding disable-mm-preprocessor-cache
    disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log
    distributed-executor-backend dtype enable-auto-tool-choice enable-chunked-prefill enable-dbo
    enable-eplb enable-expert-parallel enable-force-include-usage enable-log-outputs
    enable-log-requests enable-lora enable-lora-bias enable-mm-embeds
    enable-multimodal-encoder-data-parallel enable-prefix-caching enable-prompt-adapter
    enable-prompt-embeds enable-prompt-tokens-details enable-reasoning
    enable-request-id-headers enable-server-load-tracking enable-sleep-mode
    enable-ssl-refresh enable-tokenizer-info-endpoint enforce-eager eplb-config
    eplb-log-balancedness eplb-step-interval eplb-window-size
    exclude-tools-when-tool-choice-none expert-placement-strategy fully-sharded-loras
    generation-config gpu-memory-utilization guided-decoding-backend
    guided-decoding-disable-additional-properties guided-decoding-disable-any-whitespace
    guided-decoding-disable-fallback h11-max-header-count h11-max-incomplete-event-size headless
    hf-config-path hf-overrides hf-token host ignore-patterns interleave-mm-strings
    io-processor-plugin kv-cache-dtype kv-cache-memory-bytes kv-events-config
    kv-offloading-backend kv-offloading-size
    kv-sharing-fast-prefill kv-transfer-config limit-mm-per-prompt load-format log-config-file
    logits-processor-pattern logits-processors logprobs-mode long-lora-scaling-factors
    long-prefill-token-threshold lora-dtype lora-extra-vocab-size lora-modules mamba-block-size
    mamba-cache-dtype mamba-ssm-cache-dtype max-cpu-loras max-cudagraph-capture-size max-log-len
    max-logprobs max-long-partial-prefills max-lora-rank max-loras max-model-len
    max-num-batched-tokens max-num-partial-prefills max-num-seqs max-parallel-loading-workers
    max-prompt-adapter-token max-prompt-adapters max-seq-len-to-capture media-io-kwargs
    middleware mm-encoder-attn-backend mm-encoder-tp-mode mm-processor-cache-gb
    mm-processor-cache-type mm-processor-kwargs mm-shm-cache-max-object-size-mb model model-impl
    model-loader-extra-config multi-step-stream-outputs ngram-prompt-lookup-max
    ngram-prompt-lookup-min num-gpu-blocks-override num-lookahead-slots num-redundant-experts
    num-scheduler-seqs num-scheduler-steps num-speculative-tokens otlp-traces-endpoint
    override-attention-dtype override-generation-config override-neuron-config
    override-pooler-config pipeline-parallel-size pooler-config port preemption-mode
    prefix-caching-hash-algo pt-load-map-location qlora-adapter-name-or-path quantization
    ray-workers-use-nsight reasoning-parser response-role return-tokens-as-token-ids revision
    root-path rope-scaling rope-theta runner safetensors-load-strategy scheduler-cls
    scheduler-delay-factor scheduling-policy seed served-model-name show-hidden-metrics-for-version
    skip-mm-profiling skip-tokenizer-init spec-decoding-acceptance-method speculative-config
    speculative-disable-by-batch-size speculative-disable-mqa-scorer
    speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model
    speculative-model-quantization ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-keyfile
    structured-outputs-config swap-space task tensor-parallel-size tokenizer tokenizer-mode
    tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type tokenizer-revision
    tool-call-parser tool-parser-plugin tool-server trust-remote-code trust-request-chat-template
    typical-acceptance-sampler-posterior-alpha typical-acceptance-sampler-posterior-threshold uds
    use-tqdm-on-load use-v2-block-manager uvicorn-log-level video-pruning-rate weights-load-device
    worker-cls worker-extension-cls
"""
"""Flags of `vllm serve` 0.7 to 0.12 and of the vendor's fork."""

SERVE = ["serve", "m"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Run `gaudiserve serve` up to the start of processes, with log capture."""
    monkeypatch.setattr("server.cli.start.serve", lambda *arguments: 0)
    monkeypatch.setattr("server.cli.main.check_early", lambda *arguments: None)
    monkeypatch.setattr("config.log.setup", lambda *arguments, **options: None)
    caplog.set_level(logging.INFO)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints about flags that it rejects."""
    assert cli.main([*SERVE, *words]) == 2
    return capsys.readouterr().err


def test_every_flag_of_vllm_is_either_supported_accepted_or_refused() -> None:
    settings = {name for flag in FLAGS for name in flag.names} | {"config"}
    settings |= FIELD_FLAGS.keys()

    for name in VLLM.split():
        answers = [name in settings, name in ACCEPTED, bool(absence(name)) and name not in ACCEPTED]
        assert sum(answers) == 1, name


def test_one_message_names_every_flag_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = (
        "--nnodes 2 --enable-eplb --long-lora-scaling-factors 2 --kv-cache-dtype fp4 "
        "--max-modellen 9 --frobnicate --port x "
        "--quantization hqq --enable-prefix-caching=maybe"
    )

    message = refused(capsys, *line.split())

    first, *others = message.splitlines()
    assert first == "gaudiserve: 9 settings are invalid:"
    assert sorted(line.split()[0] for line in others) == [
        "--enable-eplb",
        "--enable-prefix-caching",
        "--frobnicate",
        "--kv-cache-dtype",
        "--long-lora-scaling-factors",
        "--max-modellen",
        "--nnodes",
        "--port",
        "--quantization",
    ]
    assert (
        "--max-modellen is not a flag of gaudiserve serve; did you mean --max-model-len?" in message
    )
    assert "--nnodes is '2', it must be 1: --distributed-executor-backend ray" in message


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 1 -pp 1 -dp 1",
        "--tokenizer-mode auto",
        "--tokenizer m",
        "--preemption-mode swap",
        "--trust-remote-code",
        "--use-v2-block-manager",
        "--guided-decoding-backend auto",
        "--guided-decoding-backend xgrammar",
        "--guided-decoding-backend outlines",
        "--guided-decoding-backend lm-format-enforcer",
        "--guided-decoding-backend guidance",
        "--guided-decoding-backend xgrammar:no-fallback",
        "--guided-decoding-backend outlines:no-fallback,disable-any-whitespace",
        "--guided-decoding-disable-fallback",
        "--guided-decoding-disable-any-whitespace",
        "--structured-outputs-config.disable_fallback true",
        """--structured-outputs-config {"backend":"xgrammar","disable_any_whitespace":true}""",
        "--structured-outputs-config.backend xgrammar",
        """--structured-outputs-config {"backend":"outlines"}""",
        "--compilation-config {}",
        "--compilation-config.mode 3 --compilation-config.use_inductor=false",
        "-O3",
        "-O.level=3",
        "--optimization-level 2",
        "--collect-detailed-traces all",
        """--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}""",
        "--disable-log-stats",
        "--enable-reasoning True",
        "--enable-reasoning=true",
        "--max-seq-len-to-capture 32768",
        "--preemption-mode recompute",
        "--scheduler-delay-factor 0",
        "--disable-custom-all-reduce",
        "--use-padding-aware-scheduling",
        "--enable-reasoning",
        "--multi-step-stream-outputs False",
        "--max_parallel_loading_workers 2",
    ],
)
def test_a_flag_without_effect_is_accepted_and_logged_with_its_reason(
    line: str, served: None, caplog: pytest.LogCaptureFixture
) -> None:
    code = cli.main([*SERVE, *line.split()])

    (_, record) = [record for record in caplog.records if record.name == cli.__name__]
    assert code == 0
    assert record.message.startswith("Accepted without effect: --")
    assert record.message.endswith(")")


def test_all_flags_without_effect_are_logged_in_one_line(
    served: None, caplog: pytest.LogCaptureFixture
) -> None:
    cli.main([*SERVE, "--preemption-mode=swap", "--trust-remote-code", "--num-lookahead-slots=8"])

    (_, record) = [record for record in caplog.records if record.name == cli.__name__]
    assert (
        "--preemption-mode swap (--swap-space above 0 keeps blocks of preempted" in record.message
    )
    assert "--trust-remote-code (code in a checkpoint is never run" in record.message
    assert "--num-lookahead-slots 8 (--num-speculative-tokens sets the number" in record.message


def test_the_log_has_a_warning_for_each_note(
    served: None, caplog: pytest.LogCaptureFixture
) -> None:
    cli.main([*SERVE, "--max-num-seq", "4", "--chat-template", "examples/template_llava.jinja"])

    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert messages == [
        "--max-num-seq is read as --max-num-seqs; write the whole name",
        "--chat-template examples/template_llava.jinja is a file of vLLM's image that does not "
        "exist here: the model's own chat template is used",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-tp 0", "tensor-parallel-size is 0, it must be at least 1"),
        ("-pp=0", "pipeline-parallel-size is 0, it must be at least 1"),
        ("-dcp=2", "decode-context-parallel-size is '2', it must be 1"),
        (
            "-dp 4 -dpl 2",
            "on this host: set --data-parallel-address, where the other hosts connect",
        ),
        ("-dp 2 -dpn 2", "--data-parallel-rank is 2 and --data-parallel-size-local is 1: their"),
        ("--data-parallel-hybrid-lb", "the server itself distributes the requests over its eng"),
        ("--load-format pt", "load-format is 'pt', it must be one of auto, safetensors, dummy"),
        ("--kv-cache-dtype tq3", "is 'tq3', it must be one of auto, bfloat16, float16"),
        ("--tokenizer other", "is 'other', it must be the model's name: the tokenizer is in the"),
        ("--tokenizer-mode own", "is 'own', it must be auto or hf or slow or mistral"),
        ("--distributed-executor-backend flux", "is 'flux', it must be one of auto, uni, mp"),
        ("--swap-space -1", "swap-space is -1.0, it must be at least 0"),
        ("--cpu-offload-gb -1", "cpu-offload-gb is -1.0, it must be at least 0"),
        ("--preemption-mode drop", "is 'drop', it must be recompute or swap"),
        (
            "--guided-decoding-backend own",
            "is 'own', it must be auto or guidance or xgrammar or outl",
        ),
        ("--structured-outputs-config.enable_in_reasoning true", 'must be {"backend": "auto"}'),
        ("--guided-decoding-backend guidance:no-additional-properties", "it must be auto or gui"),
        ("--guided-decoding-backend own:no-fallback", "it must be auto or guidance or xgrammar"),
        ("--guided-decoding-disable-additional-properties", "is not supported: an object"),
        ("--enable-chunked-prefill=no", "--enable-chunked-prefill takes no value, and --enable-c"),
        ("--max-logprobs 21", "max-logprobs is 21, it must be between 0 and 20"),
        ("-q hqq", "quantization is 'hqq', it must be one of auto-round, awq, bitsandbytes"),
        ("--generation-config ./folder", "is './folder', it must be one of auto, vllm"),
        ("--weights-load-device xpu", "weights-load-device is 'xpu', it must be cpu or hpu"),
        ('--model-loader-extra-config {"a":1}', "is '{\"a\":1}', it must be {}"),
        ("--speculative-model x", "--speculative-config has no --num-speculative-tokens"),
        ("--num-speculative-tokens 5", "--speculative-config names no method: it must be one of"),
        ("--speculative-max-model-len 5", "--speculative-max-model-len is not supported"),
        ("--models a b", "--models is not supported: a server has a single model; start a"),
        ("--enable-eplb", "--enable-eplb is not supported: --enable-expert-parallel gives each"),
        ("--cuda-graph-sizes 8", "--cuda-graph-sizes is not supported: --execution-mode"),
        (
            "--limit-mm-per-prompt image=x",
            "--limit-mm-per-prompt is 'image=x', which is not",
        ),
        ("--mm-processor-cache-type shm", "--mm-processor-cache-type is not supported"),
        ("--enable-lora-bias", "--enable-lora-bias is not supported: only low-rank adapters"),
        ("--lora-extra-vocab-size 9", "--lora-extra-vocab-size is not supported"),
        ("--ssl-cert-reqs 2", "not supported: --ssl-ca-certs makes the server ask for"),
        ("--tokenizer-revision main", "the tokenizer comes with the model, at --revision"),
    ],
)
def test_an_unsupported_value_or_flag_is_refused_with_the_reason(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = refused(capsys, *line.split())

    assert message in printed
    assert printed.count("\n") == 1
    assert "did you mean" not in printed


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("-q int8", "quantization", "int8"),
        ("-q=int8", "quantization", "int8"),
        ("--quantization None", "quantization", None),
        ("-asc 2", "api-server-count", 2),
        ("-dp 4", "data-parallel-size", 4),
        ("-dp 4 -dpr 2 -dpl 2 -dpa 10.0.0.1", "data-parallel-rank", 2),
        ("--served-model-name a b", "served-model-name", ("a", "b")),
        ("--served-model-name a,b", "served-model-name", ("a", "b")),
        ("--served-model-name a --served-model-name b c", "served-model-name", ("a", "b", "c")),
        ("--disable-log-requests", "enable-log-requests", False),
        ("--enforce-eager", "enforce-eager", True),
        ("--max-logprobs 5", "max-logprobs", 5),
        ("--num-scheduler-steps 8", "num-scheduler-steps", 8),
        ("--num_scheduler_seqs 16", "num-scheduler-steps", 16),
        ("--seed 7", "seed", 7),
        ("--revision abc", "revision", "abc"),
        ("--block-size 128", "block-size", 128),
        ("--dtype half", "dtype", "float16"),
        ("--num-gpu-blocks-override 64", "num-gpu-blocks-override", 64),
        ("--uvicorn-log-level trace", "log-level", "debug"),
        ("--generation-config vllm", "generation-config", "vllm"),
        (
            """--override-generation-config '{"temperature": 0.5}'""",
            "override-generation-config",
            '{"temperature": 0.5}',
        ),
    ],
)
def test_a_flag_of_vllm_sets_the_equivalent_setting(
    line: str, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["config", "m", *shlex.split(line), "--json"])

    found = json.loads(capsys.readouterr().out)[key]["value"]
    assert code == 0
    assert (tuple(found) if isinstance(found, list) else found) == value


def test_the_value_of_an_unknown_flag_is_not_read_as_a_second_model() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--model", "m", "--frobnicate", "value"], environ={})

    assert str(caught.value) == "--frobnicate is not a flag of gaudiserve serve"


def test_a_model_after_the_served_names_is_not_read_as_a_name() -> None:
    with pytest.raises(ConfigError, match=r"takes 'a' and './model', and no model is named: put"):
        load(["--served-model-name", "a", "./model"], environ={}, default_model="demo")

    named = load(["--served-model-name", "a", "b", "--model", "x"], environ={})
    assert named.server.served_model_names == ("a", "b")


def test_unsupported_features_may_be_switched_off() -> None:
    off = load(["m", "--no-enable-lora-bias", "--no-enable-eplb"], environ={})
    keywords = from_keywords(
        model="m", enable_lora_bias=False, speculative_config=None, tokenizer=None
    )

    assert not off.without_effect and not keywords.without_effect
    with pytest.raises(ConfigError, match="lora_extra_vocab_size is not supported"):
        from_keywords(model="m", lora_extra_vocab_size=0)


def test_the_command_line_of_the_page_is_accepted() -> None:
    page = (DOCS / "coming-from-vllm.md").read_text(encoding="utf-8")
    command = page.partition("```console\n")[2].partition("```")[0]
    program, name, *words = shlex.split(command.replace("\\\n", ""))

    loaded = load(words, environ={})

    assert (program, name) == ("gaudiserve", "serve")
    assert loaded.server.served_model_names == ("llama", "llama-3")
    assert list(loaded.without_effect) == ["--trust-remote-code"]
    assert loaded.engine.offload.swap_space == 4


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--max-num-secs", "--max-num-seqs"),
        ("--max-num-sequenz", "--max-num-seqs"),
        ("--max-number-seqs", "--max-num-seqs"),
        ("--max-modellen", "--max-model-len"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--enable-prefix-cashing", "--enable-prefix-caching"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--tp", "-tp (--tensor-parallel-size)"),
    ],
)
def test_the_nearest_flag_name_is_suggested(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{word} is not a flag of gaudiserve serve; did you mean {meant}?" in refused(
        capsys, word
    )


@pytest.mark.parametrize(
    "word", ["-t", "-p", "-m", "--top-k", "--foo", "--workers", "--most-log", "--n-gpu-layers"]
)
def test_a_flag_unlike_all_others_gets_no_suggestion(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, word, "1") == f"gaudiserve: {word} is not a flag of gaudiserve serve\n"


def test_the_reasons_name_existing_flags() -> None:
    known = set(server_parser("serve", "")._option_string_actions)
    reasons = [why for _, why in ABSENT] + [accepted.why for accepted in ACCEPTED.values()]
    reasons += [variable.reason for variable in vendor_variables()]

    named = {flag for reason in reasons for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", reason)}

    assert len(named) > 30
    assert named <= known


def test_short_flags_map_to_existing_or_refused_flags() -> None:
    known = server_parser("serve", "")._option_string_actions

    assert all(name in known or absence(name) for name in SHORT_FORMS.values())


def test_keyword_arguments_of_vllm_are_accepted_and_refused_like_its_flags() -> None:
    loaded = from_keywords(model="m", nnodes=1, preemption_mode="swap", trust_remote_code=True)

    assert set(loaded.without_effect) == {
        "--nnodes 1",
        "--preemption-mode swap",
        "--trust-remote-code",
    }
    with pytest.raises(
        ConfigError, match=r"2 settings.*\n.*enable_lora_bias is not su.*\n.*must be 1"
    ):
        from_keywords(model="m", enable_lora_bias=True, nnodes=2)
