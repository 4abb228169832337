"""Flags of `vllm serve` and its Gaudi plug-in that are not settings here: accepted without effect,
or refused with a reason."""

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from config.json_text import parse_json

SHORT_FORMS: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-spec-draft-tp": "--speculative-draft-tensor-parallel-size",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
}


def short_forms(flags: Iterable[str]) -> list[str]:
    """The short forms of the flags: -tp for --tensor-parallel-size."""
    wanted = set(flags)
    return [short for short, flag in SHORT_FORMS.items() if flag in wanted]


GRAMMAR_COMPILERS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
"""Names of vLLM's back ends for structured output, and auto."""
_GRAMMAR_OPTIONS = ("disable_any_whitespace", "disable_fallback")
"""Options of these back ends that always apply here, as JSON keys. _OPTIONS_OF_NAME matches the
same options after the name of a back end."""
_OPTIONS_OF_NAME = re.compile(
    r":(no-fallback|disable-any-whitespace)(,(no-fallback|disable-any-whitespace))*$"
)

_TEMPLATE_FOLDERS = ("/app", "/app/data/template", "/opt/app-root/template")
"""Template folders in Red Hat's vLLM images."""
_TEMPLATE_FILES = re.compile(r"template_llava|tool_chat_template_[\w.]+")
"""Template names in vLLM's image, without the suffix."""

MODEL, NUMBER = "the model's name", "a number"
"""Placeholders in `VALUES`: the value of --model, and any number."""

_SEVERAL_HOSTS = (
    "--distributed-executor-backend ray places the workers of an engine on several hosts"
)

VALUES = (
    # (flags, accepted values (empty: any), reason why they have no effect)
    (
        "decode-context-parallel-size prefill-context-parallel-size",
        ("1",),
        "--tensor-parallel-size and --pipeline-parallel-size divide a model among devices",
    ),
    ("nnodes", ("1",), _SEVERAL_HOSTS),
    (
        "data-parallel-backend",
        ("mp",),
        "engines are processes that the server starts",
    ),
    (
        "config-format",
        ("auto", "hf", "mistral"),
        "config.json is always read, even beside a params.json",
    ),
    (
        "tokenizer",
        (MODEL,),
        "the tokenizer is in the model's folder; replace it there",
    ),
    (
        "tokenizer-mode",
        ("auto", "hf", "slow", "mistral"),
        "the model's files determine the kind of tokenizer",
    ),
    ("tokenizer-pool-size", ("0",), "--tokenizer-threads sets the number of threads"),
    ("code-revision", (), "code in a checkpoint is never run"),
    (
        "weights-load-device",
        ("cpu", "hpu"),
        "weights are read tensor by tensor and copied to the device at once; with "
        "--quantization inc, quantized weights are read on the host",
    ),
    (
        "model-loader-extra-config",
        ("{}",),
        "weights are read tensor by tensor and copied to the device at once",
    ),
    (
        "preemption-mode",
        ("recompute", "swap"),
        "--swap-space above 0 keeps blocks of preempted requests in host memory; they are copied "
        "back where that is faster than recomputing them",
    ),
    ("prefix-caching-hash-algo", (), "prefix blocks are always hashed by SHA-256"),
    ("num-lookahead-slots", (NUMBER,), "--num-speculative-tokens sets the number of drafts"),
    ("scheduler-delay-factor", ("0",), "a waiting prompt starts with the next step"),
    (
        "max-num-partial-prefills max-long-partial-prefills",
        ("1",),
        "--max-prefill-batch and --max-num-batched-tokens limit the prompts of a step",
    ),
    (
        "long-prefill-token-threshold",
        ("0",),
        "--max-num-batched-tokens limits the tokens of a step",
    ),
    (
        "max-seq-len-to-capture",
        (NUMBER,),
        "the buckets and --graph-reserved-mem decide which shapes are captured, at any length",
    ),
    (
        "guided-decoding-backend",
        GRAMMAR_COMPILERS,
        "llguidance compiles all grammars, schemas and patterns",
    ),
    (
        "structured-outputs-config",
        (*(json.dumps({"backend": name}) for name in GRAMMAR_COMPILERS), "{}"),
        "llguidance compiles all grammars, schemas and patterns, and has no fallback",
    ),
    (
        "compilation-config optimization-level",
        (),
        "level 0 is --enforce-eager; else --execution-mode chooses how the "
        "model is compiled, and the buckets (such as --decode-bs-bucket-max) choose the shapes",
    ),
    (
        "kv-transfer-config",
        (),
        "the KV cache stays in its engine, which computes each prompt itself; "
        "--kv-offloading-size is its part outside the device",
    ),
    ("collect-detailed-traces", (), "traces always have all measured details"),
    ("worker-cls", ("auto",), "there is a single worker class"),
    ("lora-dtype", ("auto",), "adapters have the data type of the model"),
    (
        "chat-template-content-format",
        ("auto",),
        "the content format is detected from the chat template",
    ),
    ("response-role", ("assistant",), "answers always have the role assistant"),
    (
        "allowed-methods allowed-headers",
        ("*", '["*"]', "['*']"),
        "--allowed-origins restricts callers; all methods and headers are allowed",
    ),
    ("max-parallel-loading-workers", (NUMBER,), "each worker loads the weights of its own rank"),
    ("safetensors-load-strategy", (), "weights are read tensor by tensor"),
)
SWITCHES = (
    # (switches, accepted states (empty: both), reason why they have no effect)
    ("enable-ssl-refresh", (), "the files of TLS are always read again when they change"),
    (
        "trust-remote-code",
        (),
        "code in a checkpoint is never run; a model that needs it is refused when it is read",
    ),
    (
        "use-padding-aware-scheduling",
        ("true",),
        "the scheduler always merges prompts by the cost of the padded launch",
    ),
    (
        "skip-mm-profiling",
        (),
        "memory profiling always includes the vision tower",
    ),
    ("disable-log-stats", ("true",), "there is no periodic log line; see /metrics"),
    ("use-v2-block-manager", (), "there is one block manager"),
    (
        "disable-hybrid-kv-cache-manager",
        (),
        "the layers of a model decide which kinds of blocks the cache has",
    ),
    (
        "disable-custom-all-reduce disable-nccl-for-dp-synchronization",
        (),
        "the back end chooses the collectives of a group of devices",
    ),
    (
        "guided-decoding-disable-fallback guided-decoding-disable-any-whitespace",
        (),
        "llguidance compiles all grammars, and has no fallback",
    ),
    ("disable-cascade-attn", (), "cascade attention is not supported"),
    ("disable-async-output-proc", (), "--overlap-depth 1 turns the overlap of steps off"),
    ("multi-step-stream-outputs", (), "the tokens of a step are sent when the step ends"),
    ("disable-frontend-multiprocessing", (), "each engine of a server runs in its own process"),
    ("enable-reasoning", ("true",), "--reasoning-parser alone enables reasoning"),
    ("enable-sleep-mode", ("true",), "/sleep requires --enable-dev-endpoints and an API key"),
    ("enable-server-load-tracking", ("true",), "/load is always served"),
    ("enable-prompt-tokens-details", ("true",), "usage always has the prompt token details"),
    ("enable-tokenizer-info-endpoint", ("true",), "/tokenizer_info is always served"),
    ("enable-request-id-headers", ("true",), "answers always have X-Request-Id"),
    ("enable-offline-docs", ("true",), "/docs needs no internet"),
    ("use-tqdm-on-load", (), "a progress bar is shown on a terminal"),
)

ABSENT = (
    # (flags, reason why they are not in this version)
    (
        "data-parallel-hybrid-lb data-parallel-external-lb",
        "the server itself distributes the requests over its engines",
    ),
    ("models", "a server has a single model; start a server for each"),
    ("headless", "a host with --data-parallel-rank above 0 has no API server"),
    ("node-rank master-addr master-port", _SEVERAL_HOSTS),
    (
        "all2all-backend expert-placement-strategy num-redundant-experts enable-eplb eplb-* "
        "enable-dbo dbo-* ubatch-size",
        "--enable-expert-parallel gives each device the same number of experts, in order",
    ),
    ("ray-workers-use-nsight worker-extension-cls", "plug-ins for workers are not supported"),
    (
        "enable-lora-bias lora-extra-vocab-size long-lora-scaling-factors "
        "qlora-adapter-name-or-path enable-prompt-adapter max-prompt-adapters "
        "max-prompt-adapter-token",
        "only low-rank adapters are supported (--enable-lora)",
    ),
    (
        "speculative-disable-* speculative-max-model-len speculative-model-quantization "
        "spec-decoding-acceptance-method typical-acceptance-sampler-* "
        "disable-logprobs-during-spec-decoding",
        "drafts are accepted without loss, and on a CPU their number adapts to load and acceptance",
    ),
    (
        "mm-processor-cache-type mm-shm-cache-* mm-encoder-attn-* mm-tensor-ipc "
        "interleave-mm-strings video-pruning-rate enable-mm-embeds disable-chunked-mm-input",
        "these options of images are not supported",
    ),
    ("disable-mm-preprocessor-cache", "--mm-processor-cache-gb 0 keeps no preprocessed images"),
    (
        "enable-multimodal-encoder-data-parallel",
        "--mm-encoder-tp-mode data divides the images of a step among the devices",
    ),
    ("language-model-only", "--limit-mm-per-prompt sets 0 images and videos of a prompt"),
    (
        "cudagraph-* cuda-graph-sizes max-cudagraph-capture-size",
        "--execution-mode chooses how the model is compiled, and the buckets (such as "
        "--decode-bs-bucket-max) choose the shapes",
    ),
    (
        "attention-backend attention-config kernel-config",
        "each device has a single attention backend",
    ),
    (
        "pt-load-map-location ignore-patterns",
        "weights are read tensor by tensor and copied to the device at once",
    ),
    ("kv-cache-dtype-skip-layers", "all layers use --kv-cache-dtype"),
    (
        "kv-events-config kv-sharing-fast-prefill",
        "the KV cache stays in its engine; --kv-offloading-size is its part outside the device",
    ),
    ("mamba-*", "recurrent states have a fixed layout and a separate cache"),
    ("hf-token", "set the variable HF_TOKEN"),
    (
        "hf-config-path override-attention-dtype",
        "the model is what its config.json says; --hf-overrides changes its fields",
    ),
    ("tokenizer-revision", "the tokenizer comes with the model, at --revision"),
    ("disable-sliding-window", "set --max-model-len to the length of the window"),
    ("tokenizer-pool-*", "--tokenizer-threads sets the number of threads"),
    ("enable-prompt-embeds io-processor-plugin", "prompts are text or token ids"),
    ("enable-return-routed-experts", "answers have tokens and log-probabilities"),
    (
        "logits-processors logits-processor-pattern scheduler-cls middleware tool-parser-plugin "
        "reasoning-parser-plugin additional-config",
        "there are no plug-ins",
    ),
    (
        "guided-decoding-disable-additional-properties",
        "an object may have unnamed properties unless its schema says "
        '"additionalProperties": false',
    ),
    (
        "ssl-cert-reqs",
        "--ssl-ca-certs makes the server ask for certificates of clients, and require them",
    ),
    ("ssl-ciphers", "Python's ssl module chooses the ciphers of a server"),
    ("grpc", "the server speaks HTTP"),
    ("allow-credentials", "keys travel in the Authorization header, not in cookies"),
    ("exclude-tools-when-tool-choice-none", "send no tools with the request"),
    ("tool-server", "the client runs the tools"),
    (
        "log-config-file max-log-len enable-log-outputs enable-log-deltas log-error-stack",
        "--log-level, --enable-log-requests and --disable-access-log choose what is logged",
    ),
    (
        "show-hidden-metrics-for-version enable-mfu-metrics kv-cache-metrics* "
        "enable-layerwise-nvtx-tracing aggregate-engine-logging enable-per-request-metrics",
        "/metrics and traces always have all measurements",
    ),
    ("profiler-config", "--profiler and --profiler-trace write a trace"),
    ("override-neuron-config", "the flag is for another device"),
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A vLLM flag that is accepted without effect."""

    values: tuple[str, ...]
    """Accepted values; empty: any value."""
    why: str
    is_switch: bool = False

    @property
    def shown(self) -> str:
        """The accepted values, as text."""
        return " or ".join(filter(None, self.values)) or "any"

    def fits(self, value: object, model: str) -> bool:
        """Whether the flag may be ignored with this `value`."""
        word = _plain(value).lower()
        number = _number(word)
        return not self.values or any(
            word == accepted
            or (accepted == MODEL and str(value) == model)
            or (number is not None and accepted in (NUMBER, f"{number:g}"))
            for accepted in self.values
        )


def _plain(value: object) -> str:
    """`value` as text, without _GRAMMAR_OPTIONS; an object, also as JSON text, as json.dumps writes
    the object."""
    if not isinstance(value, Mapping):
        try:
            value = parse_json(str(value))
        except ValueError:
            return _OPTIONS_OF_NAME.sub("", str(value))
    if not isinstance(value, Mapping):
        return str(value)
    return json.dumps({key: item for key, item in value.items() if key not in _GRAMMAR_OPTIONS})


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _accepted() -> Iterator[tuple[str, Accepted]]:
    for rows, is_switch in ((VALUES, False), (SWITCHES, True)):
        for names, values, why in rows:
            for name in names.split():
                yield name, Accepted(values, why, is_switch)


ACCEPTED: Mapping[str, Accepted] = dict(_accepted())


def absence(name: str, rows: Iterable[tuple[str, str]] = ABSENT) -> str:
    """Reason why vLLM's flag `name` (--enable-eplb) is not in this version; empty for other
    names."""
    # --compilation-config.level is an entry of --compilation-config.
    bare = name.lstrip("-").removeprefix("no-").partition(".")[0]
    for patterns, reason in rows:
        if any(fnmatch.fnmatchcase(bare, pattern) for pattern in patterns.split()):
            return reason
    return ""


def is_chat_template(path: str) -> bool:
    """Whether `path` is the location of a chat template in a vLLM image."""
    file = PurePath(path)
    is_folder = file.parent.name == "examples" or str(file.parent) in _TEMPLATE_FOLDERS
    return is_folder and file.suffix == ".jinja" and bool(_TEMPLATE_FILES.fullmatch(file.stem))
