"""deploy/vendor_torch.py: errors on a machine without the vendor's package, for a replaced torch,
and for an environment with another torch on a Gaudi machine."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from gaudi_machine import GaudiMachine

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "vendor_torch.py"


def test_a_machine_without_the_vendors_package_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "check"], capture_output=True, text=True, timeout=30
    )

    assert done.returncode == 1
    assert "habana_frameworks" in done.stderr


def test_an_environment_of_make_serve_is_refused_with_its_remedy(tmp_path: Path) -> None:
    venv.create(tmp_path / "closed", with_pip=False)
    venv.create(tmp_path / "open", with_pip=False, system_site_packages=True)

    closed, opened = (
        subprocess.run(
            [tmp_path / name / "bin/python", SCRIPT, "check"], capture_output=True, text=True
        )
        for name in ("closed", "open")
    )

    assert closed.returncode == 1
    assert "run `make clean`, then `make install-hpu`" in closed.stderr
    assert "make clean" not in opened.stderr


@pytest.mark.parametrize(
    ("node", "vendor", "words"),
    [
        ("accel/accel0", "0x1da3", "has Gaudi cards (/dev/accel/accel0): run `make install-hpu` "),
        ("accel/accel0", "0x8086", ""),
        ("hl0", None, "this machine has Gaudi cards (/dev/hl0): run `make install-hpu` first,"),
        ("null", None, ""),
    ],
)
def test_a_machine_with_cards_needs_the_vendors_torch(
    tmp_path: Path, node: str, vendor: str | None, words: str
) -> None:
    machine = GaudiMachine(tmp_path, cards=0)
    if vendor is None:
        machine.write(f"dev/{node}", "")
    else:
        machine.card(0, vendor=vendor)

    done = run(tmp_path / "none", "not-needed", str(tmp_path))

    assert done.returncode == (1 if words else 0)
    assert words in done.stderr
    assert done.stderr.count("\n") == (1 if words else 0)


@pytest.mark.parametrize("target", ["install", "serve"])
def test_make_stops_before_it_creates_an_environment_over_the_vendors_runtime(
    tmp_path: Path, target: str
) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "runtime/habana_frameworks").mkdir(parents=True)
    (tmp_path / "runtime/habana_frameworks/__init__.py").touch()
    command = ["make", "-f", ROOT / "Makefile", target, f"PYTHON={sys.executable}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "runtime")}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.returncode == 2
    assert "habana_frameworks, the Gaudi runtime: run `make install-hpu` first" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_replaced_torch_is_detected(tmp_path: Path) -> None:
    pins = subprocess.run(
        [sys.executable, SCRIPT, "constraints"], capture_output=True, text=True, check=True
    ).stdout
    same, other = tmp_path / "same", tmp_path / "other"
    same.write_text(pins)
    other.write_text(re.sub(r"torch==\S+", "torch==2.6.0+hpu.1", pins))

    statuses = [
        subprocess.run([sys.executable, SCRIPT, "same", file], capture_output=True).returncode
        for file in (same, other)
    ]

    assert statuses == [0, 1]


def distribution(folder: Path, name: str, number: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the script with only the distributions in `folder`."""
    code = (
        "import runpy, sys; own, script = sys.argv[1:3]; sys.argv = sys.argv[2:];"
        "sys.path = [own, *(path for path in sys.path if 'site-packages' not in path)];"
        "runpy.run_path(script, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(folder), str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_packages_built_for_the_vendors_torch_are_pinned_with_it(tmp_path: Path) -> None:
    for name in ("torch", "torchvision", "torchaudio", "Pillow-SIMD"):
        distribution(tmp_path, name, "1.0")

    pins = run(tmp_path, "constraints").stdout.split()

    assert pins == ["torch==1.0", "torchvision==1.0", "torchaudio==1.0", "pillow-simd==1.0"]


def test_pillow_installed_over_pillow_simd_is_detected(tmp_path: Path) -> None:
    before, simd = tmp_path / "before", tmp_path / "simd"
    distribution(simd, "Pillow-SIMD", "9.5.0")
    before.write_text(run(simd, "constraints").stdout)
    assert run(simd, "same", str(before)).returncode == 0

    distribution(simd, "pillow", "12.0")

    done = run(simd, "same", str(before))
    assert done.returncode == 1
    assert "pillow was installed over pillow-simd in" in done.stderr
