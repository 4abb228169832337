"""deploy/vendor_torch.py: errors on a machine without the vendor's package, and for a replaced
torch."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy" / "vendor_torch.py"


def test_a_machine_without_the_vendors_package_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "check"], capture_output=True, text=True, timeout=30
    )

    assert done.returncode == 1
    assert "habana_frameworks" in done.stderr


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
