"""A Hugging Face hub on this machine, which records its requests."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Models from folders. `token`: needed for the files of models in `gated`, and for any request
    about models in `private`."""

    folder: Path
    url: str = ""
    token: str = "hf_right"
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    """Models that get a 500."""
    downloaded: list[str] = field(default_factory=list)
    """Files that were sent, with the model's name: `org/name/config.json`."""

    def add(self, model: str, files: dict[str, str | bytes]) -> None:
        """Add a model with `files`."""
        for name, content in files.items():
            path = self.folder / model / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def names(self, model: str) -> list[str]:
        """Downloaded files of a model."""
        prefix = f"{model}/"
        return sorted(
            name.removeprefix(prefix) for name in self.downloaded if name.startswith(prefix)
        )


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """A hub that serves the models in `folder`."""
    hub = FakeHub(folder)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *words: object) -> None:
        pass

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        org, name, *rest = parts[2:] if is_api else parts
        model = f"{org}/{name}"
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if model in self.hub.broken:
            self._send(500, b"")
        elif not (self.hub.folder / model).is_dir() or (
            model in self.hub.private and not has_token
        ):
            # The hub does not reveal whether a private model exists.
            status = 404 if "Authorization" in self.headers else 401
            self._send(status, b"", {"X-Error-Code": "RepoNotFound"})
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            self._tell(model, listing="tree" in rest)
        elif model in self.hub.gated and not has_token:
            status = 403 if "Authorization" in self.headers else 401
            self._send(status, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self._file(model, "/".join(rest[2:]))

    def _tell(self, model: str, *, listing: bool) -> None:
        folder = self.hub.folder / model
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        rows: list[dict[str, Any]] = [
            {
                "type": "file",
                "path": path.relative_to(folder).as_posix(),
                "rfilename": path.relative_to(folder).as_posix(),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]
        facts = {"id": model, "sha": COMMIT, "siblings": rows, "tags": [], "private": False}
        body = json.dumps(rows if listing else facts).encode()
        self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, model: str, name: str) -> None:
        path = self.hub.folder / model / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        if self.command == "GET":
            self.hub.downloaded.append(f"{model}/{name}")
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
