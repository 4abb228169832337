"""API keys: which requests pass, and the owner of each key."""

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from delays import machine_s

from config.errors import ConfigError
from server.http.auth import ApiKeys
from server.http.errors import InvalidApiKey

Header = tuple[bytes, bytes]


def scope(*headers: Header, method: str = "POST", path: str = "/v1/responses") -> dict[str, Any]:
    return {"method": method, "path": path, "headers": headers}


def bearer(key: str) -> Header:
    return b"authorization", b"Bearer " + key.encode()


def x_api_key(key: str) -> Header:
    return b"x-api-key", key.encode()


def test_the_owner_is_the_digest_of_the_key_in_either_header() -> None:
    keys = ApiKeys(["one", "two", "drei€"])

    owners = [
        keys.check(scope(form(key))) for key in ("two", "drei€") for form in (bearer, x_api_key)
    ]

    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("two", "drei€")]
    assert owners == [digests[0], digests[0], digests[1], digests[1]]


def test_the_first_right_key_in_the_headers_is_the_owner() -> None:
    keys = ApiKeys(["one", "two"])

    owner = keys.check(scope(bearer("wrong"), x_api_key("two"), x_api_key("one")))

    assert owner == keys.check(scope(bearer("two")))


@pytest.mark.parametrize("key", ["wrong", "key 29999"])
def test_the_time_of_a_check_does_not_grow_with_the_number_of_keys(key: str) -> None:
    keys = ApiKeys([f"key {number}" for number in range(30_000)])
    sent = scope(*[bearer("wrong")] * 3, bearer(key))

    def seconds() -> float:
        began_s = time.thread_time()
        with contextlib.suppress(InvalidApiKey):
            keys.check(sent)
        return time.thread_time() - began_s

    assert min(seconds() for _ in range(20)) < machine_s(0.001)


def test_a_duplicate_key_has_a_single_owner() -> None:
    owners = {
        ApiKeys(given).check(scope(bearer("a"))) for given in (["a", "b", "a"], ["a"], ["b", "a"])
    }

    assert len(owners) == 1


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([(b"authorization", b"one")], "The Authorization header does not begin with 'Bearer '"),
        ([], "No API key was given"),
        ([(b"authorization", b"one"), x_api_key("two")], "The API key is wrong"),
    ],
)
def test_a_refusal_names_what_is_wrong_with_the_headers(
    headers: list[Header], message: str
) -> None:
    with pytest.raises(InvalidApiKey, match=message):
        ApiKeys(["one"]).check(scope(*headers))


def test_requests_that_need_no_key_have_no_owner() -> None:
    keys = ApiKeys(["one"])

    owners = [
        keys.check(scope(bearer("one"), path="/health")),
        keys.check(scope(method="OPTIONS")),
        ApiKeys([]).check(scope(bearer("any"))),
    ]

    assert owners == ["", "", ""]
    with pytest.raises(InvalidApiKey):
        keys.check(scope(bearer("on")))


def test_keys_of_a_file_are_added_and_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team A\nsecond\n\n  third \n")
    keys = ApiKeys(["first"], str(file))
    assert all(keys.check(scope(bearer(key))) for key in ("first", "second", "third"))

    file.write_text("fourth\n")
    keys.reload()

    assert keys.check(scope(bearer("first"))) and keys.check(scope(bearer("fourth")))
    with pytest.raises(InvalidApiKey):
        keys.check(scope(bearer("second")))


def test_a_key_file_without_keys_is_refused_and_the_old_keys_remain_valid(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n")
    keys = ApiKeys([], str(file))
    file.write_text("# none\n\n")

    with pytest.raises(ConfigError, match=r"keys, which has 0 keys in 2 lines"):
        keys.reload()

    assert keys.check(scope(bearer("second")))
    file.unlink()
    with pytest.raises(ConfigError, match=r"--api-key-file is .*No such file"):
        keys.reload()


def test_a_key_file_that_would_block_or_never_end_is_refused(tmp_path: Path) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    os.mkfifo(fifo)
    large.touch()
    os.truncate(large, 2**30)

    for file, reason in (
        (fifo, "it is not a regular file"),
        ("/dev/zero", "it is not a regular file"),
        (tmp_path, "it is a folder"),
        (large, "it has 1073741824 bytes, at most 1048576 are allowed"),
    ):
        with pytest.raises(ConfigError, match=f"--api-key-file is {file}: {reason}"):
            ApiKeys((), str(file))
