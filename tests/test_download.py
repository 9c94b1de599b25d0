"""Downloads from a hub of this process: one that cuts connections, sends damaged bytes, or does not know the model."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from sparkmoe.download import NOTE, File, check_space, default_folder, download, listing
from sparkmoe.errors import DataError, MachineError
from sparkmoe.machine import Machine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The two endpoints of a model hub that a download uses, over the files of a folder."""

    def __init__(self, source: Path) -> None:
        self.files = {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()}
        self.files |= {"modeling_evil.py": b"raise SystemExit", "picture.png": b"png"}
        self.cut: set[str] = set()  # files whose first transfer breaks off in the middle
        self.damage: dict[str, int] = {}  # how often a file is sent with a wrong byte
        self.ranges: list[str] = []
        self.sent: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.serve(self, body=False)

            def do_GET(self) -> None:
                hub.serve(self, body=True)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        Thread(target=self.http.serve_forever, daemon=True).start()

    def serve(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.split("?")[0]
        if path.startswith("/api/models/org/model/tree/"):
            return self.answer(request, json.dumps(self.tree()).encode(), {})
        if path.startswith("/api/models/org/model"):
            return self.answer(request, json.dumps(self.info()).encode(), {})
        if not path.startswith("/org/model/resolve/"):
            return self.answer(request, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"}, 404)
        name = path.rsplit("/", 1)[-1]
        content, tag = self.files[name], hashlib.sha256(self.files[name]).hexdigest()
        start = 0
        if body:
            self.sent.append(name)
            if given := request.headers.get("Range"):
                self.ranges.append(name)
                start = int(given.removeprefix("bytes=").split("-")[0])
            if self.damage.get(name, 0) > 0:
                self.damage[name] -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(request, content[start:], headers, 206 if start else 200, body=body, cut=body and name in self.cut)
        self.cut.discard(name) if body else None
        return None

    def answer(
        self, request: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str], status: int = 200, *,
        body: bool = True, cut: bool = False,
    ) -> None:  # fmt: skip
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content[: len(content) // 2] if cut else content)
        request.close_connection = cut or request.close_connection

    def tree(self) -> list[dict[str, Any]]:
        files = self.info()["siblings"]
        return [{"type": "file", "path": f["rfilename"], "size": f["size"], "oid": f["blobId"]} for f in files]

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
            if name.endswith(".safetensors"):
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "private": False, "siblings": siblings}


@pytest.fixture
def hub(miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))  # whatever this disk has
    made = Hub(miniature)
    yield made
    made.http.shutdown()
    made.http.server_close()


def fetch(hub: Hub, folder: Path) -> Any:
    return download("org/model", folder, endpoint=hub.url)


def test_a_model_arrives_whole_and_without_its_code(hub: Hub, tmp_path: Path, miniature: Path) -> None:
    seen = fetch(hub, tmp_path / "model")
    assert seen.draft_layers == 1
    names = {p.name for p in (tmp_path / "model").iterdir() if p.is_file()}
    assert names == {p.name for p in miniature.iterdir() if p.is_file()} | {NOTE}
    hub.sent.clear()
    fetch(hub, tmp_path / "model")
    assert hub.sent == []  # nothing comes twice


def test_a_cut_connection_is_resumed(hub: Hub, tmp_path: Path) -> None:
    shard = next(name for name in hub.files if name.endswith(".safetensors"))
    hub.cut = {shard}
    fetch(hub, tmp_path / "model")
    assert hub.ranges == [shard]
    assert (tmp_path / "model" / shard).read_bytes() == hub.files[shard]


def test_damaged_bytes_are_noticed_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    shard = next(name for name in hub.files if name.endswith(".safetensors"))
    hub.damage = {shard: 1, "config.json": 1}
    fetch(hub, tmp_path / "model")
    assert sorted(hub.sent).count(shard) == 2
    hub.damage = {shard: 9}
    with pytest.raises(DataError, match=rf"{shard}: twice not the bytes that org/model lists at 0123456789ab"):
        fetch(hub, tmp_path / "other")


def test_a_file_that_decayed_on_the_disk_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fetch(hub, folder)
    shard = next(folder.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    fetch(hub, folder)
    assert shard.read_bytes() == hub.files[shard.name]


def test_a_full_disk_is_said_before_the_first_byte(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(MachineError, match=r"not enough room in .*: 0.0 GiB to come \+ 2 GiB to spare, 1.0 GiB free"):
        fetch(hub, tmp_path / "model")
    assert hub.sent == []


def test_what_is_there_already_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [File("a", 3, "", None), File("b", 5, "", None)]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    assert check_space(tmp_path, files) == 8
    (tmp_path / "a").write_text("aaa")
    partial = tmp_path / ".cache/huggingface/download"
    partial.mkdir(parents=True)
    (partial / "x.incomplete").write_text("bb")
    assert check_space(tmp_path, files) == 3
    (tmp_path / "b").write_text("bbbbb")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert check_space(tmp_path, files) == 0


def test_errors_are_one_sentence(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot list org/other at main"):
        listing("org/other", endpoint=hub.url)
    with pytest.raises(DataError, match="cannot list org/model"):
        listing("org/model", endpoint="http://127.0.0.1:1")
    hub.files = {"README.md": b"hello"}
    with pytest.raises(DataError, match=r"no \*\.safetensors file"):
        fetch(hub, tmp_path / "model")


def test_the_spark_profile_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARKMOE_MODEL", raising=False)
    default_folder().mkdir(parents=True)
    (default_folder() / "config.json").write_text("{}")
    assert Machine.named("spark").default_model == default_folder()
