"""The workflows of GitHub and the scripts that they run agree with the tree. They do not run here:
the workflows need a runner, and .ci/deploy needs Docker and kind."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import ROOT

from config.version import VERSION
from deploy.release import problem

CHANGELOG = "## [Unreleased]\n\n## [1.2.0] - 2026-11-30\n"
SCRIPT = (ROOT / ".ci" / "deploy").read_text(encoding="utf-8")


def workflow(name: str) -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize(
    ("tag", "version", "word"),
    [
        ("v1.2.0", "1.2.0", ""),
        ("1.2.0", "1.2.0", "tag v1.2.0"),
        ("v1.2.1", "1.2.0", "VERSION"),
        ("v1.3.0", "1.3.0", "CHANGELOG.md has no entry"),
        ("v1x2.0", "1x2.0", "CHANGELOG.md has no entry"),
    ],
)
def test_a_release_tag_must_equal_the_version_and_have_a_changelog_entry(
    tag: str, version: str, word: str
) -> None:
    found = problem(tag, version, CHANGELOG)

    assert word in found
    assert bool(found) == bool(word)


@pytest.mark.parametrize(("tag", "status"), [(f"v{VERSION}", 0), ("v0.0.0", 1)])
def test_the_script_compares_the_tag_with_this_tree(tag: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "release.py", tag], capture_output=True, text=True
    )

    assert done.returncode == status
    assert done.stdout == ("" if status else f"version={VERSION}\n")


def test_the_released_images_equal_the_images_of_the_guide() -> None:
    images = workflow("release.yml")["jobs"]["images"]["strategy"]["matrix"]["include"]
    guide = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")

    assert {image["file"] for image in images} == {path.name for path in ROOT.glob("Dockerfile*")}
    for image in images:
        text = (ROOT / image["file"]).read_text(encoding="utf-8")
        assert f"`{image['kind']}-{VERSION}`" in guide
        assert not image["extras"] or "ARG EXTRAS\n" in text or "ARG EXTRAS=\n" in text


def test_images_are_pushed_only_after_the_tests() -> None:
    jobs = workflow("release.yml")["jobs"]
    needed = {name: [step.get("run") for step in jobs[name]["steps"]] for name in jobs}

    assert jobs["images"]["needs"] == ["check", "test"]
    assert ".ci/run" in needed["test"] and ".ci/deploy" in needed["check"]


def test_workflows_have_minimal_permissions_and_timeouts() -> None:
    for name in ("ci.yml", "release.yml"):
        found = workflow(name)
        assert found["permissions"] == {"contents": "read"}
        for job in found["jobs"].values():
            assert job["timeout-minutes"] <= 120
            assert set(job.get("permissions", ())) <= {"contents", "packages"}


def test_an_action_is_named_by_its_commit_and_keeps_no_credentials() -> None:
    for name in ("ci.yml", "release.yml"):
        steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
        actions = [step for step in steps if "uses" in step]
        # A tag of another repository may move.
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in actions)
        checkouts = [step for step in actions if step["uses"].startswith("actions/checkout@")]
        assert len(checkouts) == len(workflow(name)["jobs"])
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_ci_runs_each_python_version_of_the_package() -> None:
    versions = workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    assert versions == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)


SUBSTITUTE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
    inspect*) echo "${EXIT_STATUS}" ;;
    *chat/completions*) echo '{"content": "Tokyo"}' ;;
esac
"""
"""A program that writes its arguments down, and answers as docker and curl do."""


@pytest.mark.parametrize("exit_status", [0, 137])
def test_the_ci_script_queries_each_server_and_fails_for_a_killed_server(
    tmp_path: Path, exit_status: int
) -> None:
    for name in ("docker", "kind", "kubectl", "curl"):
        program = tmp_path / name
        program.write_text(SUBSTITUTE)
        program.chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "EXIT_STATUS": str(exit_status),
    }

    done = subprocess.run([ROOT / ".ci" / "deploy"], env=environment, capture_output=True)

    lines = calls.read_text(encoding="utf-8").splitlines()
    asked = [line for line in lines if "chat/completions" in line]
    assert (done.returncode == 0, len(asked)) == ((True, 3) if exit_status == 0 else (False, 1))
    if exit_status:
        # The log of the server ends the output.
        assert lines[-1] == "docker logs gaudiserve"
        return
    words = {
        line.rpartition("--profile serve ")[2].split()[0] for line in lines if "compose" in line
    }
    assert words == {"up", "down"}
    assert lines[-1] == "kind delete cluster"


def test_the_ci_script_names_existing_files() -> None:
    done = subprocess.run(["bash", "-n", ROOT / ".ci" / "deploy"], capture_output=True, text=True)
    words = shlex.split(SCRIPT.replace("\\\n", " "), comments=True)

    assert (done.returncode, done.stderr) == (0, "")
    named = [part for word in words for part in word.split() if part.startswith("deploy/")]
    assert len(named) > 3
    assert all((ROOT / name).exists() for name in named)
