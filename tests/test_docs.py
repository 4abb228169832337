"""The documents match the code: links, flags, every example of README and API."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from config.loading.parser import server_parser
from config.loading.sources import load
from config.loading.vllm_flags import absence
from server.cli.bench.options import bench_parser
from server.cli.buckets import buckets_parser
from server.cli.calibrate import calibrate_parser
from server.cli.chat import chat_parser
from server.cli.plan import plan_parser
from server.cli.presets import presets_parser
from server.cli.quantize import quantize_parser
from server.cli.run_batch import batch_parser

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api.md"
SPECULATION = ROOT / "docs" / "speculation.md"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MANIFESTS = ("compose.yaml", "compose.local.yaml", "kubernetes/base/deployment.yaml")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEXT = re.compile(r"^```(\w+)\n(.*?)^```\n(.*?)(?=^```|\Z)", re.MULTILINE | re.DOTALL)
"""Code blocks, each with the text up to the next one."""
COMMANDS = [
    (page.name, text)
    for page in PAGES
    # test_plan.py and test_docs_gaudi.py run these, and compare the output.
    if page.name not in ("plan.md", "gaudi.md", "gaudi-tuning.md")
    for kind, text in FENCE.findall(page.read_text(encoding="utf-8"))
    if kind == "console" and "gaudiserve " in text
]
EXAMPLES = [
    (name, kind, text)
    for name, page in (
        ("README", README),
        ("api", API.read_text(encoding="utf-8")),
        ("speculation", SPECULATION.read_text(encoding="utf-8")),
    )
    for kind, text in FENCE.findall(page)
    if kind in ("bash", "python")
]
ANSWERS = [
    (example, shown)
    for (_, example, gap), (kind, shown, _) in pairwise(
        NEXT.findall(API.read_text(encoding="utf-8"))
    )
    if gap == "\n" and kind == "json"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))

    missing = [link for link in links if not (page.parent / link).exists()]

    assert missing == []


def test_the_index_has_every_page_once() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")

    linked = re.findall(r"\]\(([^)/#]+\.md)\)", index)

    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert sorted(linked) == sorted(pages)


def anchors(page: Path) -> set[str]:
    """The anchors that a reader of a page can link to, as GitHub forms them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_with_an_anchor_lead_to_a_heading(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", text)

    missing = [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in anchors(page.parent / file if file else page)
    ]

    assert missing == []


def test_the_files_that_the_pages_name_exist() -> None:
    folders = "benchmarks|config|deploy|docs|engine|hpu|server|tests"
    path = re.compile(rf"(?<![\w/.])(?:{folders})/[\w/.-]*[\w/]")
    named = {(page.name, name) for page in PAGES for name in path.findall(page.read_text("utf-8"))}

    missing = sorted((page, name) for page, name in named if not (ROOT / name).exists())

    assert len(named) > 50
    assert missing == []


def test_flags_that_the_documents_name_exist() -> None:
    known = set(server_parser("serve", "")._option_string_actions)
    known |= set(bench_parser()._option_string_actions)
    known |= set(quantize_parser()._option_string_actions)
    known |= set(buckets_parser("fit")._option_string_actions)
    known |= set(plan_parser()._option_string_actions)
    known |= set(presets_parser()._option_string_actions)
    known |= set(calibrate_parser()._option_string_actions)
    known |= set(batch_parser()._option_string_actions)
    known |= set(chat_parser()._option_string_actions)
    known |= {"--no-NAME", "--max_model_len", "--version", "--gpu-memory-util"}
    # clients.md has the flags of other programs.
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.name != "clients.md"]
    texts += [(ROOT / "deploy" / name).read_text(encoding="utf-8") for name in MANIFESTS]

    # Benchmarks have other flags.
    text = re.sub(r"python benchmarks/[^`\n]*", "", "\n".join(texts))
    named = set(re.findall(r"(?<![\w-])(--[a-zA-Z][\w-]+)", text))

    # coming-from-vllm.md lists these.
    named = {name for name in named if not absence(name)}

    # Flags of kubectl, in a manifest, of docker, of pip and of our tests.
    others = {"--from-literal", "--rm", "--runtime", "--cap-add", "--ipc", "--build-arg"}
    others |= {"--extra-index-url", "--previous", "--profile"}
    others |= {"--abort-on-container-exit", "--crd-schemas"}
    # Flags of Ray and of torchrun.
    others |= {"--head", "--address", "--nproc-per-node"}
    assert named - others <= known


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None

    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout

    assert all(f"make {target} " in shown for target in targets[1].split())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(url, folder) of a tiny model served under the name of the demo model."""
    from live import running
    from tiny_models import make_tiny

    folder = make_tiny("llama", tmp_path_factory.mktemp("docs") / "tiny")
    log = tmp_path_factory.mktemp("log") / "log"
    with running(str(folder), log, "--served-model-name=demo") as live:
        yield live.url, str(folder)


@pytest.fixture(scope="module")
def embedding_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a tiny embedding model."""
    from live import running
    from tiny_encoders import make_pooling

    folder = make_pooling("bert", tmp_path_factory.mktemp("docs") / "tiny")
    with running(str(folder), tmp_path_factory.mktemp("log") / "log") as live:
        yield live.url


@pytest.fixture
def run_example(
    request: pytest.FixtureRequest, served: tuple[str, str]
) -> Callable[[str, str], str]:
    def run(kind: str, example: str) -> str:
        if ":8001" in example:
            embedding_url = request.getfixturevalue("embedding_url")
            example = example.replace("http://localhost:8001", embedding_url)
        return printed_by(kind, example, served)

    return run


def printed_by(kind: str, example: str, served: tuple[str, str]) -> str:
    url, folder = served
    text = example.replace("http://localhost:8000", url)
    # Offline there is no served name: use the folder.
    text = text.replace('LLM(model="demo"', f"LLM(model={folder!r}")
    program = [sys.executable, "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*program, text],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "kind", "example"),
    EXAMPLES,
    ids=[f"{name} {kind} {i}" for i, (name, kind, _) in enumerate(EXAMPLES)],
)
def test_an_example_runs(
    name: str, kind: str, example: str, run_example: Callable[[str, str], str]
) -> None:
    printed = run_example(kind, example)

    assert printed.strip()
    if name == "README" and kind == "bash" and "/v1/" in example:
        assert json.loads(printed)["choices"][0]["message"]["role"] == "assistant"


GENERATES = re.compile(
    r"/v1/(chat/completions|completions|responses|messages)'? |"
    r"\b(completions|responses|messages)\.(create|stream|parse)\(|\bllm\.(chat|generate)\("
)
LIMIT = re.compile(r"\bmax_(tokens|output_tokens|completion_tokens)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_that_generates_has_a_limit(page: Path) -> None:
    blocks = [text for _, text in FENCE.findall(page.read_text(encoding="utf-8"))]

    unlimited = [text for text in blocks if GENERATES.search(text) and not LIMIT.search(text)]

    # The request of this page is refused.
    assert [text for text in unlimited if '"temperature": 3' not in text] == []


def shape(value: Any) -> Any:
    """The nested keys of an answer, of a list those of its first entry; None for each value."""
    if isinstance(value, dict):
        # The keys of top_logprobs are texts of tokens.
        return {key: shape(inner) for key, inner in value.items() if key != "top_logprobs"}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else []
    return None


@pytest.mark.parametrize(("example", "shown"), ANSWERS, ids=range(len(ANSWERS)))
def test_a_shown_answer_has_the_keys_of_the_real_one(
    example: str, shown: str, run_example: Callable[[str, str], str]
) -> None:
    printed = run_example("bash", example)

    assert shape(json.loads(printed)) == shape(json.loads(shown))


@pytest.mark.parametrize(("page", "example"), COMMANDS, ids=[page for page, _ in COMMANDS])
def test_the_commands_of_the_documents_run(
    page: str, example: str, served: tuple[str, str], tmp_path: Path
) -> None:
    lines = [{"prompt_tokens": 90 + 7 * i, "output_tokens": 30 + i} for i in range(20)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = {"prompt": "Hello", "max_tokens": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(request) + "\n")
    running = ["--base-url", served[0]]
    more = {
        "bench": [*running, "--num-prompts", "2"],
        "run-batch": running,
        "chat": [*running, "--quick", "Hello"],
    }
    commands = [shlex.split(line) for line in example.replace("\\\n", "").splitlines()]

    for program, name, *words in commands:
        assert program == "gaudiserve"
        if name == "serve":
            server_parser("serve", "").parse_all([word for word in words if word != "..."])
            continue
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "gaudiserve",
                name,
                *words,
                *more.get(name, ()),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=60,
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_example_config_file_is_read(tmp_path: Path) -> None:
    (example,) = [
        t
        for kind, t in FENCE.findall((ROOT / "docs/configuration.md").read_text(encoding="utf-8"))
        if kind == "yaml"
    ]

    (tmp_path / "serve.yaml").write_text(example)
    loaded = load(["--config", str(tmp_path / "serve.yaml")], environ={})

    assert loaded.engine.max_model_len == 8192
    assert loaded.server.allowed_origins == ("https://chat.example.com",)


def test_the_readme_has_an_example_of_each_kind() -> None:
    text = "\n".join(example for name, _, example in EXAMPLES if name == "README")

    for word in ("curl", "OpenAI(", "stream=True", "tools=", "LLM(", "/metrics"):
        assert word in text


def test_every_metric_in_the_documents_is_served(served: tuple[str, str]) -> None:
    named = set(
        re.findall(r"`((?:vllm:|hpu_|gaudiserve:)\w+)`", (ROOT / "docs/metrics.md").read_text())
    )

    with urlopen(f"{served[0]}/metrics", timeout=10) as answer:
        text = answer.read().decode()

    assert len(named) > 10
    assert {name for name in named if f"{name.removesuffix('_total')}" not in text} == set()
