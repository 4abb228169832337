"""Values of the variable for compiled recipes on disk, in the form that each release reads."""

from pathlib import Path

import pytest

from config.engine import EngineConfig
from config.loading import env
from config.loading.env import hpu_environment, recipe_cache_folder
from config.loading.recipe_cache import RECIPE_CACHE_CONFIG, recipe_cache_config, refused_form


@pytest.mark.parametrize(
    ("release", "fields"),
    [("1.20.1", 3), ("1.21.3.57", 3), ("1.22.0", 4), ("1.24.1.481", 4), ("2.0", 4), ("", 1)],
)
def test_a_value_has_the_fields_that_the_release_reads(
    release: str, fields: int, tmp_path: Path
) -> None:
    value = recipe_cache_config(str(tmp_path), release)

    assert value.split(",") == [str(tmp_path), "false", "8192", "false"][:fields]
    assert refused_form(value, release) == ""


@pytest.mark.parametrize("character", [*" ,;&|$*?~^`'\"\\<>%[]{}", "\t"])
def test_a_path_that_later_releases_refuse_keeps_no_recipes(character: str, tmp_path: Path) -> None:
    folder = str(tmp_path / f"a{character}b")

    assert recipe_cache_config(folder, "1.24.1") == ""
    assert refused_form(folder, "1.24.1") != ""


def test_a_symbolic_link_is_replaced_by_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")

    value = recipe_cache_config(str(tmp_path / "link"), "1.24.1")

    assert value == f"{tmp_path}/target,false,8192,false"
    assert "symbolic link" in refused_form(f"{tmp_path}/link,false,100,false", "1.24.1")


def test_a_worker_of_each_release_gets_the_form_of_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECIPE_CACHE_CONFIG, raising=False)
    config = EngineConfig("m", device="hpu", cache_dir=str(tmp_path))
    given = []
    for release in ("1.21.0", "1.22.1"):
        monkeypatch.setattr(env, "installed_version", lambda name, found=release: found)
        given.append(hpu_environment(config)[RECIPE_CACHE_CONFIG])
        assert recipe_cache_folder(config) == tmp_path / "hpu-recipes"

    assert given == [
        f"{tmp_path}/hpu-recipes,false,8192",
        f"{tmp_path}/hpu-recipes,false,8192,false",
    ]
