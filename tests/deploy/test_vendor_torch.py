"""deploy/vendor_torch.py: a machine without the vendor's package, and a replaced torch."""

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


def test_a_replaced_torch_is_noticed(tmp_path: Path) -> None:
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
