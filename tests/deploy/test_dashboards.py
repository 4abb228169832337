"""grafana.json and alerts.yaml agree with the metrics and the documents; with `make test-deploy`
promtool tests the rules, and a Prometheus that scrapes a loaded server answers every panel."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, running
from manifests import KUBERNETES, ROOT, documents
from ports import free_port
from tiny_models import make_tiny

ALERTS = ROOT / "deploy" / "alerts.yaml"
GROUPS = documents(ALERTS.read_text(encoding="utf-8"))[0]["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = [entry["name"] for entry in DASHBOARD["templating"]["list"]]
NAME = re.compile(r"\b(?:vllm:|gaudiserve:|hpu_|http_)\w+")
WINDOW_S = 5


def test_queries_use_documented_metrics() -> None:
    # test_docs_examples.py checks that a server has all metrics of this page.
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`((?:vllm:|gaudiserve:|hpu_|http_)\w+)`", page))
    used = {name for _, text in QUERIES for name in NAME.findall(text)}
    used |= {name for rule in RULES for name in NAME.findall(rule["expr"])}

    assert len(used) > 25
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= known


def test_panels_have_unique_ids_titles_and_positions() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in PANELS]
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]

    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert len(set(cells)) == len(cells)


def test_every_query_filters_by_the_variables_of_the_dashboard() -> None:
    # http_requests_total has no model.
    filters = ["namespace", "pod", "instance"]
    missing = [
        (title, name)
        for title, text in QUERIES
        for selector in re.findall(r"\{[^}]*\}", text)
        for name in filters + ["model_name"] * ("handler" not in selector)
        if f'{name}=~"${name}"' not in selector
    ]

    assert missing == []
    assert set(VARIABLES) == {"datasource", *filters, "model_name"}
    # A metric without braces would follow no variable.
    assert all(len(NAME.findall(text)) == text.count("{") for _, text in QUERIES)


def test_alerts_and_legends_name_the_pod_of_a_cluster() -> None:
    sums = [clause for rule in RULES for clause in re.findall(r"by \((.*?)\)", rule["expr"])]
    legends = [target["legendFormat"] for panel in PANELS for target in panel["targets"]]

    assert [clause for clause in sums if not clause.startswith("namespace, pod, instance")] == []
    assert len(sums) > 2
    for text in legends + [rule["annotations"]["summary"] for rule in RULES]:
        assert ("instance" in text) == ("pod" in text), text


def test_the_rules_of_the_prometheus_operator_equal_the_file() -> None:
    (rule,) = documents((KUBERNETES / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))

    assert rule["spec"]["groups"] == GROUPS


def test_the_guide_has_a_remedy_for_each_alert() -> None:
    guide = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")

    assert [rule["alert"] for rule in RULES if f"`{rule['alert']}`" not in guide] == []


def test_the_runbook_of_an_alert_is_a_section_of_the_guide() -> None:
    for rule in RULES:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        titles = re.findall(
            r"^### `(\w+)`$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert anchor == rule["alert"].lower()
        assert titles.count(rule["alert"]) == 1


@pytest.mark.deploy
@pytest.mark.parametrize("command", [["check", "rules", "deploy/alerts.yaml"],
                                     ["test", "rules", "tests/deploy/alerts_test.yaml"]],
                         ids=lambda words: words[0])  # fmt: skip
def test_promtool_accepts_the_rules(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deploy
def test_each_alert_has_a_rule_test() -> None:
    text = (ROOT / "tests" / "deploy" / "alerts_test.yaml").read_text(encoding="utf-8")

    assert {rule["alert"] for rule in RULES} == set(re.findall(r"alertname: (\w+)", text))


class Prometheus:
    """A real Prometheus server that scrapes one server each second."""

    def __init__(self, folder: Path, server: LiveServer) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        shipped = documents((ROOT / "deploy" / "prometheus.yaml").read_text(encoding="utf-8"))[0]
        shipped["global"] = {
            "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s",
        }  # fmt: skip
        assert shipped["rule_files"] == ["alerts.yaml"]
        shipped["rule_files"] = [str(ALERTS)]
        (job,) = shipped["scrape_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
        config = folder / "prometheus.json"
        config.write_text(json.dumps(shipped))
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._http = httpx.Client(base_url=self.url, timeout=10, verify=False)

    def get(self, path: str, **params: str) -> Any:
        return self._http.get(f"/api/v1/{path}", params=params).raise_for_status().json()["data"]

    def wait(self) -> None:
        """Wait until Prometheus has scraped the server."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            assert self._process.poll() is None, self._log.read_text()
            try:
                if self.get("query", query="sum(up)")["result"][0]["value"][1] == "1":
                    return
            except (httpx.HTTPError, LookupError):
                pass
            time.sleep(0.2)
        raise AssertionError(self._log.read_text()[-2000:])

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a server under load. The load has ended; the server still
    runs."""
    folder = tmp_path_factory.mktemp("prometheus")
    model = str(make_tiny("llama", folder / "tiny"))
    with running(model, folder / "log", "--served-model-name=tiny", "--max-num-seqs=2") as live:
        prometheus = Prometheus(folder, live)
        try:
            prometheus.wait()
            prompt = "a long enough prompt to fill some blocks of the cache " * 8
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            end = time.monotonic() + 2 * WINDOW_S
            while time.monotonic() < end:
                assert live.http.post("/v1/completions", json={**body, "n": 4}).status_code == 200
            yield prometheus
        finally:
            prometheus.close()


@pytest.mark.deploy
def test_no_panel_is_empty_under_load(prometheus: Prometheus) -> None:
    empty = []
    for title, query in QUERIES:
        text = query.replace("$__rate_interval", f"{WINDOW_S * 2}s")
        for name in VARIABLES:
            text = text.replace(f"${name}", ".*")
        result = prometheus.get("query", query=text)["result"]
        numbers = [series["value"][1] for series in result]
        if not numbers or "NaN" in numbers:
            empty.append((title, query, numbers))

    assert empty == []
    assert len(QUERIES) > 40


@pytest.mark.deploy
def test_prometheus_evaluates_the_rules_and_a_healthy_server_raises_no_alert(
    prometheus: Prometheus,
) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        groups = prometheus.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if all(rule["health"] == "ok" for rule in rules):
            break
        time.sleep(0.5)

    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in RULES}
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
