"""`make test-deploy`: the install steps of the images, executed without Docker: each `RUN` of a
Dockerfile that installs this package, in a clean environment and with other folders."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dockerfiles import instructions
from manifests import ROOT

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(540)]

VENDOR = {"torch": "2.11.0a0+git0a1b2c3", "habana-torch-plugin": "1.24.1.482"}
"""Empty substitutes for the vendor's packages: the install steps check only names and versions."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the tree that `COPY . .` copies."""
    skipped = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    names = [name.removeprefix("**/") for name in skipped]
    # Folders that exist only on machines with a development environment.
    names += [".venv*", "node_modules", "build", "*.egg-info"]
    return Path(shutil.copytree(ROOT, tmp_path / "src", ignore=shutil.ignore_patterns(*names)))


def run_steps(name: str, folders: dict[str, Path], path: Path | None, cwd: Path) -> int:
    """Run the install steps that call pip, with other folders and with `path` first in PATH, and
    return the number of steps."""
    environment = {**os.environ, "EXTRAS": "", "PIP_ROOT_USER_ACTION": "ignore"}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    count = 0
    for word, value in instructions((ROOT / name).read_text(encoding="utf-8")):
        if word != "RUN" or " pip " not in value:
            continue
        for folder, other in folders.items():
            value = value.replace(folder, str(other))
        done = subprocess.run(
            ["sh", "-euc", value], cwd=cwd, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{value}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        count += 1
    return count


def stub_wheel(folder: Path, name: str, version: str, module: str) -> None:
    """Write a wheel with an empty module."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        info = f"{stem}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("name", ["Dockerfile.hpu", "Dockerfile.hpu.ubi"])
def test_the_steps_of_an_hpu_image_install_the_server_and_keep_the_vendors_torch(
    name: str, source: Path, tmp_path: Path
) -> None:
    base, stubs, build = tmp_path / "base", tmp_path / "stubs", tmp_path / "build"
    subprocess.run([sys.executable, "-m", "venv", base], check=True)
    stubs.mkdir()
    modules = {"torch": "torch", "habana-torch-plugin": "habana_frameworks"}
    for package, version in VENDOR.items():
        stub_wheel(stubs, package, version, modules[package])
    subprocess.run(
        # The vendor's image also has numpy.
        [base / "bin/python", "-m", "pip", "install", "--no-deps", "numpy", *stubs.iterdir()],
        check=True,
    )
    build.mkdir()
    for file in ("vendor_torch.py", "package_names.py"):
        shutil.copy(ROOT / "deploy" / file, build)

    # Put the wheels where the second stage copies them.
    folders = {"/wheels": build / "wheels", "rm -rf /tmp/build": Path("true"), "/tmp/build": build}
    count = run_steps(name, folders, base / "bin", source)

    assert count == 2
    shown = subprocess.run(
        [base / "bin/pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"{package}=={version}" in shown for package, version in VENDOR.items())
    for command in ("gaudiserve", "vllm"):
        said = subprocess.run(
            [base / "bin" / command, "--version"], capture_output=True, text=True, cwd=tmp_path
        )
        assert said.returncode == 0, said.stderr


def test_the_steps_of_the_cpu_image_install_the_package_with_its_dependencies(
    source: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "opt"

    assert run_steps("Dockerfile", {"/opt/gaudiserve": venv}, None, source) == 1

    # The environment contains everything that the server needs; the source folder is not used.
    said = subprocess.run(
        [venv / "bin/gaudiserve", "plan", "demo"], capture_output=True, text=True, cwd=tmp_path
    )
    assert said.returncode == 0, said.stderr
    found = subprocess.run(
        [venv / "bin/python", "-c", "import torch, server; print(server.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    ).stdout
    assert found.startswith(str(venv))
