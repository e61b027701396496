"""A hub on the loopback address: the routes that `huggingface_hub` and `datasets` need to read a
dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote, urlparse

NAME = "nobody/texts"


class Hub(ThreadingHTTPServer):
    """A server of one dataset, in a folder.

    Attributes:
        revision: its revision
        fail: given the path of a request, returns a status with which it fails, -1 to close the
            connection, or 0
        paths: paths of all requests
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.revision = "a" * 40
        self.fail: Callable[[str], int] = lambda path: 0
        self.paths: list[str] = []
        self.lock = Lock()
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlparse(self.path).path)
        with self.server.lock:
            self.server.paths.append(path)
            status = self.server.fail(path)
        if status < 0:
            self.close_connection = True
        elif status:
            self.send_json({"error": f"injected {status}"}, status)
        else:
            self.answer(path, body)

    do_POST = do_GET
    do_HEAD = do_GET

    def answer(self, path: str, body: bytes) -> None:
        base = f"/api/datasets/{NAME}"
        _, _, below = path.removeprefix(f"{base}/").partition("/")  # the kind, the rest
        resolve = re.fullmatch(rf"/datasets/{NAME}/resolve/([^/]+)/(.+)", path)
        if resolve:
            self.send_file(self.server.folder / resolve[2])
        elif path == base or path.startswith(f"{base}/revision/"):
            self.send_json(self.info())
        elif path.startswith(f"{base}/tree/"):
            self.send_tree(below.partition("/")[2])
        elif path.startswith(f"{base}/paths-info/"):
            self.send_paths(body)
        else:
            self.send(404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"})

    def send_paths(self, body: bytes) -> None:
        fields = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
        names = [name for name in fields["paths"] if (self.server.folder / name).exists()]
        self.send_json([self.entry(name) for name in names])

    def info(self) -> dict[str, object]:
        names = [str(path.relative_to(self.server.folder)) for path in self.server.files()]
        siblings = [{"rfilename": name} for name in names]
        known = {"id": NAME, "_id": "1", "tags": [], "private": False}
        return known | {"sha": self.server.revision, "siblings": siblings}

    def entry(self, name: str) -> dict[str, object]:
        path = self.server.folder / name
        kind = "file" if path.is_file() else "directory"
        return {"type": kind, "oid": "0" * 40, "size": path.stat().st_size, "path": name}

    def send_tree(self, folder: str) -> None:
        query = parse_qs(urlparse(self.path).query)
        top = self.server.folder / folder
        if not top.is_dir():
            self.send(404, b'{"error": "not found"}', {"X-Error-Code": "EntryNotFound"})
            return
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        paths = sorted(top.rglob("*") if recursive else top.iterdir())
        self.send_json([self.entry(str(path.relative_to(self.server.folder))) for path in paths])

    def send_json(self, content: object, status: int = 200) -> None:
        self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{path.name}-{len(content)}"', "X-Repo-Commit": self.server.revision}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not span:
            self.send(200, content, headers)
            return
        first = int(span[1])
        last = min(int(span[2]), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(206, content[first : last + 1], headers)

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
