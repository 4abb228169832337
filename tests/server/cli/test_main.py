"""server/cli/main.py: output, exit statuses, and the absence of heavy imports."""

import json
import platform
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.env import chosen_device
from config.loading.flags import FLAGS, GROUPS
from config.loading.parser import COMMON
from config.loading.vllm_flags import SHORT_FORMS, short_forms
from config.server import ServerConfig
from config.version import VERSION
from server.cli.chat import chat_parser
from server.cli.main import COMMANDS, check_early, main

ROOT = Path(__file__).parents[3]


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])

    assert status == 2
    assert "serve [MODEL]" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--version", "-V", "-v"])
def test_version_is_printed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's short form is -v."""
    status = main([word])

    assert (status, capsys.readouterr().out) == (0, f"{VERSION}\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sevre"], "'sevre' is not a command; did you mean serve?"),
        (["serve", "/models/\udcff"], "is not UTF-8: rename the file or folder"),
        (["frobnicate"], "there are serve, bench, fetch-demo, config"),
        (["fetch-demo", "--force"], "--force is not a flag of gaudiserve fetch-demo"),
        (
            ["serve", "--prot", "1"],
            "--prot is not a flag of gaudiserve serve; did you mean --port?",
        ),
        (["config", "--port", "-1"], "port is -1, it must be between 0 and 65535"),
        (["bench", "x"], "`gaudiserve bench x` is not a command: use serve, throughput or latency"),
        (["buckets", "draw"], "`gaudiserve buckets draw` is not a command: use show or fit"),
        (["buckets", "show", "m"], "gaudiserve buckets show takes no argument 'm'"),
        (["buckets", "fit", "m", "--traffic", "x"], "gaudiserve buckets fit takes no argument 'm'"),
        (["doctor", "m"], "gaudiserve doctor takes no argument 'm'"),
        (["plan", "m", "n"], "gaudiserve plan takes no argument 'n'"),
        (["config", "m", "n"], "gaudiserve config takes no argument 'n'"),
        (["serve", "m", "n"], "no argument 'n': it takes one model; --enable-lora --lora-modules "),
        (["serve", "--host", "256.0.0.1"], "--host 256.0.0.1 cannot be used: "),
        (["fetch-demo", "m"], "gaudiserve fetch-demo takes no argument 'm'"),
        (["bench", "serve", "m"], "gaudiserve bench serve takes no argument 'm'"),
        (["version", "m"], "`gaudiserve version` takes no argument 'm'"),
        (["buckets", "fit"], "`gaudiserve buckets fit` needs --traffic FILE"),
        (["run-batch"], "`gaudiserve run-batch` needs --input-file FILE and --output-file FILE"),
        (
            ["run-batch", "-i", "/no/such", "-o", "/no/such/out"],
            "--input-file /no/such cannot be read: No such file or directory",
        ),
        (["chat", "--port", "8001"], "running server use --base-url http://127.0.0.1:8001"),
        (["chat", "--host", "10.0.0.1"], "--host has no effect: this command starts its own"),
        (["chat", "--host", "10.0.0.1"], "running server use --base-url http://10.0.0.1:8000"),
        (["run-batch", "-i", "x", "-o", "y", "--port=8001"], "--port has no effect"),
        (["chat", "nope", "--base-url=x"], "nope is the model that this command would serve"),
        (["chat", "--model=nope", "--url=x"], "--model-name selects a model of the running server"),
        (
            ["run-batch", "nope", "--base-url=x", "-i", "x", "-o", "y"],
            "leave one of them out; each line of the input names a model of the running server",
        ),
        (["chat", "--base-url=x", "--dtype=float32"], "--dtype is a setting of the server that"),
        (["chat", "--base-url=ftp://x"], "--base-url is 'ftp://x', it must look like"),
        (
            ["run-batch", "-i", "/dev/null", "-o", "/no/such/out"],
            "--output-file /no/such/out cannot be written: No such file or directory",
        ),
        (["quantize"], "`gaudiserve quantize` needs MODEL and --to KIND and --output DIR"),
        (["buckets", "show", "--trafic", "x"], "did you mean --traffic?"),
        (["buckets", "show", "--traffic", "/no/such"], "/no/such cannot be read"),
        (["buckets", "show", "--seconds-per-graph", "0"], "must be above 0"),
        (
            ["serve", "--device", "hpu", "--port", "0"],
            "habana_frameworks, the Gaudi runtime, is not installed",
        ),
        (["selftest", "--device", "cpu"], "the self-test needs a Gaudi card"),
        (["selftest", "--device", "hpu"], "this Python has no habana_frameworks"),
        (["selftest", "--fast"], "--fast is not a flag of gaudiserve selftest"),
        (["bench", "serve", "--num-prompts", "0"], "num-prompts is 0, it must be at least 1"),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_with_status_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(argv)

    captured = capsys.readouterr()
    assert status == 2
    assert words in captured.err
    assert captured.err.startswith("gaudiserve: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


NOWHERE = ("--base-url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "./none", "--port=0"], "no such file or folder: ./none"),
        (["plan", "./none"], "no such file or folder: ./none"),
        (["presets", "./none"], "no such file or folder: ./none"),
        (["plan", "{folder}"], "config.json"),
        (["presets", "{folder}"], "config.json"),
        (["bench", "serve", *NOWHERE], "no server answers"),
        (["chat", *NOWHERE], "no server answers"),
        (
            ["run-batch", "-i", "{folder}/in.jsonl", "-o", "{folder}/out.jsonl", *NOWHERE],
            "no server answers",
        ),
    ],
)
def test_a_command_that_cannot_do_its_work_exits_with_status_1(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")

    status = main([word.format(folder=tmp_path) for word in argv])

    said = capsys.readouterr().err.splitlines()[-1]
    assert status == 1
    assert said.startswith("gaudiserve: ") and words in said


@pytest.mark.parametrize("arguments", [[], ["--cache-dir", "{folder}"]])
def test_the_demo_model_is_downloaded_into_the_given_folder(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GAUDISERVE_CACHE_DIR", str(tmp_path / "variable"))
    monkeypatch.setattr(
        "config.checkpoint.resolve.resolve",
        lambda engine, report: f"{engine.model} {engine.cache_dir}",
    )

    status = main(["fetch-demo", *(word.format(folder=tmp_path) for word in arguments)])

    folder = tmp_path if arguments else tmp_path / "variable"
    assert (status, capsys.readouterr().out) == (0, f"demo {folder}\n")


BENCHES = ["bench serve", "bench throughput", "bench latency"]
BUCKETS = ["buckets show", "buckets fit"]


@pytest.mark.parametrize(
    "command", [*sorted({*COMMANDS} - {"buckets", "bench"}), *BENCHES, *BUCKETS]
)
def test_help_of_every_command_has_the_same_form(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])

    text = capsys.readouterr().out
    # An example of each command, as a user would type it.
    assert f"examples:\n  gaudiserve {command}" in text
    first, *lines = text.splitlines()
    assert ended.value.code == 0
    assert re.fullmatch(
        rf"usage: gaudiserve {command}( \[?[A-Z]+\]?)?( --?[a-z]+ [A-Z]+)*( \[flags\])?", first
    )
    assert lines[0] == "" and lines[1][0].isupper()
    assert [line for line in lines if len(line) > 100] == []
    assert re.search("^  -h, --help +Show this text$", text, re.MULTILINE)


def test_config_prints_each_value_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "m", "--port", "81", "--api-key", "secret"])

    printed = _lines(capsys)
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in printed if line}
    assert lines["port"] == ["81", "flag --port"]
    assert lines["model"] == ["m", "argument MODEL"]
    assert lines["api-key"] == ["***", "flag --api-key"]
    assert lines["seed"] == ["0", "default"]
    assert lines["max-model-len"] == ["auto", "default"]
    assert lines["shutdown-timeout"] == ["30", "default"]
    # The groups of `--help-all`, in its order.
    titles = [line for line in printed if line and not line.startswith(" ")]
    assert titles == [f"{group}:" for group in GROUPS]
    assert printed.index("HTTP:") < printed.index(_line_of("port", printed)) < len(printed)


def _line_of(key: str, lines: list[str]) -> str:
    return next(line for line in lines if line.split()[:1] == [key])


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", ["config", "doctor"])
def test_a_report_says_how_an_abbreviation_was_expanded(
    command: str, caplog: pytest.LogCaptureFixture
) -> None:
    main([command, "--max-num-seq", "8"])

    assert any("--max-num-seqs" in record.getMessage() for record in caplog.records)


def test_config_shows_an_abbreviated_flag(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "--max-num-seq", "8"])

    assert "max-num-seqs" in capsys.readouterr().out


def test_help_shows_no_empty_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])

    text = capsys.readouterr().out
    assert "--root-path" in text and "[]" not in text


def test_help_for_an_unknown_word_lists_the_groups_of_settings() -> None:
    with pytest.raises(ConfigError, match=r"groups: Files, Model, ") as refused:
        chat_parser().format_help_about("zzz")

    assert "options" not in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "status"), [(["bench", "--help"], 0), (["help", "bench"], 0), (["bench"], 2)]
)
def test_bench_help_lists_its_commands(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status

    shown = capsys.readouterr().out
    assert all(f"gaudiserve {command}" in shown for command in BENCHES)


def test_help_of_serve_shows_the_most_used_flags_in_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(shown) == sorted(f"--{name}" for name in COMMON)
    assert "  --port N                        Port to listen on [8000]" in lines


@pytest.mark.parametrize(
    ("first", "argv"),
    [
        (["serve", "--help"], ["help", "serve"]),
        (["serve", "--help-all"], ["serve", "--help=all"]),
        (["chat", "--help-all"], ["chat", "--help=all"]),
    ],
)
def test_the_help_of_a_command_is_shown_by_each_spelling(
    first: list[str], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for words in (first, argv):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)

    assert shown[0] == shown[1] != ""


def test_help_for_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "serv"]) == 2

    assert "'serv' is not a command" in capsys.readouterr().err


def test_config_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["port"] == {"value": 8000, "source": "default"}
    assert found["model"]["value"] == "demo"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_config_lists_what_has_no_effect(
    form: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FOO", "1")
    flags = ["--weights-load-device", "cpu", "--model-loader-extra-config", "{}"]

    assert main(["config", "m", *flags, *form]) == 0

    printed = capsys.readouterr()
    last = (printed.err if form else printed.out).splitlines()[-1]
    assert last.startswith("Without effect here: --weights-load-device cpu (weights are read ")
    assert "--model-loader-extra-config {} (" in last and "VLLM_FOO (" in last


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--device=cpu", "--no-fused-experts", "--gpu-memory-utilization=0.8"],
            "--no-fused-experts (only a Gaudi reads it); --gpu-memory-utilization (a CPU reads "
            "--kv-cache-memory-bytes)",
        ),
        (
            ["--device=hpu-emulator", "--compile-fullgraph", "--no-fused-experts"],
            "--compile-fullgraph (it needs --execution-mode torch-compile, the mode is hpu-graphs)",
        ),
    ],
)
def test_config_names_flags_without_effect_on_the_device(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--changed", "m", *flags]) == 0

    assert _lines(capsys)[-1] == f"Without effect here: {expected}"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_config_of_a_gaudi_on_a_machine_without_its_torch_has_a_note(
    form: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")

    assert main(["config", "--changed", "m", "--device=hpu", *form]) == 0

    printed = capsys.readouterr()
    assert '"hpu"' in printed.out if form else "hpu " in printed.out
    last = (printed.err if form else printed.out).splitlines()[-1]
    assert last.startswith("`serve` would fail on this machine: execution mode 'hpu-graphs' (")


def test_config_refuses_settings_that_contradict_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")

    assert main(["config", "m", "--device=hpu", "--execution-mode=torch-compile"]) == 2

    assert "this mode needs 0" in capsys.readouterr().err


def test_config_changed_prints_only_what_a_source_sets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GAUDISERVE_SEED", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    main(["config", "--changed", "m", "--port", "81"])
    table = _lines(capsys)
    main(["config", "--changed", "--json", "m", "--port", "81"])
    found = json.loads(capsys.readouterr().out)

    assert sorted(found) == ["model", "port", "seed"]
    assert found["seed"] == {"value": 0, "source": "variable GAUDISERVE_SEED"}
    assert [line.split()[0] for line in table if line.startswith(" ")] == ["model", "seed", "port"]


def test_config_changed_says_that_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    main(["config", "--changed"])
    assert capsys.readouterr().out == "Every setting has its default.\n"

    main(["config", "--changed", "--json"])
    assert json.loads(capsys.readouterr().out) == {}


def test_fitted_buckets_are_shown_from_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic, file = tmp_path / "traffic.jsonl", tmp_path / "buckets.txt"
    traffic.write_text('{"prompt_tokens": 300, "output_tokens": 40}\n' * 3)
    flags = ["--max-num-seqs", "4", "--traffic", str(traffic)]
    budget = ["--warmup-seconds", "30", "--seconds-per-graph", "2"]

    fitted = main(["buckets", "fit", *flags, *budget, "--output", str(file)])
    first = capsys.readouterr().out
    shown = main(["buckets", "show", *flags, "--bucketing-file", str(file)])

    again = capsys.readouterr().out
    assert (fitted, shown) == (0, 0)
    assert "15 graphs at most" in file.read_text()
    assert [line for line in first.splitlines() if "padding" in line] == [
        line for line in again.splitlines() if "padding" in line
    ]


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (["chat"], "--system-prompt"),
        (["doctor"], "--json"),
        (["plan"], "--lengths"),
        (["run-batch"], "--input-file"),
        (["presets"], "--host-cards"),
        (["config"], "--json"),
        (["buckets", "show"], "--traffic"),
    ],
)
def test_help_of_a_command_is_short_and_help_all_has_the_flags_of_the_server(
    command: list[str], own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            main([*command, flag])
        assert end.value.code == 0
        shown.append(capsys.readouterr().out)

    short, whole = shown
    assert len(short.splitlines()) <= 60
    assert own in short and "--max-num-seqs N" not in short
    assert whole.index(own) < whole.index("--max-num-seqs N")


def test_help_is_grouped_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help-all"])

    text = capsys.readouterr().out
    assert ended.value.code == 0
    for group in ("Model:", "KV cache:", "Scheduling:", "Buckets:", "HTTP:", "Logs:"):
        assert f"\n{group}\n" in text
    assert "Port to listen on; 0: a free port [8000]" in text


def test_help_of_serve_begins_with_the_names_of_its_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])

    text = capsys.readouterr().out
    found = re.search(r"groups of flags; --help=GROUP .*:\n((?:  .+\n)+)\nexamples:", text)
    assert found is not None and text.index(found[0]) < 700
    names = re.split(r",\s+", found[1].strip())
    assert len(names) == len(GROUPS) + 1
    for name in names:
        with pytest.raises(SystemExit):
            main(["serve", f"--help={name}"])
        titles = re.findall(r"^(\S.*):$", capsys.readouterr().out, re.M)
        assert name in [title.lower().replace(" ", "-") for title in titles]


def test_help_shows_short_forms_and_the_kind_of_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])

    text = capsys.readouterr().out
    shown = {flag.key for flag in FLAGS} & {name[2:] for name in SHORT_FORMS.values()}
    assert len(shown) > 8
    for key in shown:
        (short, *_) = short_forms([f"--{key}"])
        assert re.search(rf"^  {short} .*--{key}\b|^  {short}, --{key}\b", text, re.M), key
    placeholders = [("api-key-file", "FILE"), ("cache-dir", "DIR"), ("hf-overrides", "JSON")]
    for key, placeholder in [*placeholders, ("lora-modules", "NAME=PATH")]:
        assert f"--{key} {placeholder}" in text
    # A text that names a file, a folder or JSON has a placeholder that says so.
    unclear = [
        flag.key
        for flag in FLAGS
        if re.search("as JSON|^(JSON )?[Ff]ile |^Folder ", flag.setting.help)
        if not flag.setting.metavar
    ]
    assert unclear == []


def test_the_config_command_loads_no_torch_and_no_web_framework() -> None:
    code = (
        "import sys; from server.cli.main import main; main(['config']);"
        "print([n for n in ('torch', 'fastapi', 'transformers', 'zmq') if n in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_missing_model_is_refused_before_slow_imports() -> None:
    code = (
        "import sys; from server.cli.main import main; from config import cache_folder;"
        "cache_folder.CONTAINER_MARKS = ();"
        "status = main(['serve', '/no/such/model.gguf', '--port=0']);"
        "slow = ('huggingface_hub', 'zmq', 'fastapi', 'engine.core.loop');"
        "print(status, [name for name in slow if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "1 []\n", done.stderr
    assert done.stderr == "gaudiserve: no such file or folder: /no/such/model.gguf\n"


def test_the_first_line_of_the_log_names_versions_model_and_device() -> None:
    code = (
        "import sys; from server.cli import start; from server.cli.main import main;"
        "start.start = lambda engine, server: print('torch' in sys.modules) or 0;"
        "main(['serve', '--model', '/', '--port=0', '--max-num-s=4'])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "False\n", done.stderr
    first, *rest = done.stderr.splitlines()
    assert f"gaudiserve {VERSION}, Python {platform.python_version()}, torch" in first
    assert first.endswith(f"torch {version('torch')}: model /, device {chosen_device('auto')}")
    assert "--max-num-seqs" in rest[0]


def test_a_port_in_use_is_refused_before_the_model_is_resolved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        message = f"^cannot listen on 127.0.0.1:{port}: .*use another port: --port {port + 1}"
        with pytest.raises(ConfigError, match=message):
            check_early(EngineConfig("./nosuch"), ServerConfig(host="127.0.0.1", port=port))


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ("max_num_seqs", "--max-num-seqs", "--port"),
        ("http", "--port", "--max-num-seqs"),
        ("KV cache", "--block-size", "--port"),
        ("kv-cache", "--block-size", "--port"),
        # HTTP contains tp, and no word of HTTP begins with tp.
        ("tp", "-tp N, --tensor-parallel-size N", "--port"),
        ("pp", "--pipeline-parallel-size", "--port"),
    ],
)
def test_help_for_a_word_shows_a_group_or_flags(
    word: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--help={word}"])

    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown in text and hidden not in text


def test_help_for_an_unknown_word_lists_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["serve", "--help=frobnicate"])

    assert status == 2
    error = capsys.readouterr().err
    assert "no flag of gaudiserve serve has 'frobnicate' in its name" in error
    assert "groups: Files, Model, " in error


@pytest.mark.parametrize("wrong", ["--max-model-length", "--max-model-lenn"])
def test_a_flag_that_is_too_long_names_the_nearest(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", wrong, "5"]) == 2
    assert "did you mean --max-model-len?" in capsys.readouterr().err
