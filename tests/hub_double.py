"""A small Hub on the loopback: repositories, commits, large files, downloads, and connections that break when told to.

It speaks what `huggingface_hub` 2.4 asks for when a model is pushed or loaded, and keeps everything in memory.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_secretSECRETsecret"
LARGE = re.compile(r"\.(safetensors|bin|h5|model)$")


@dataclass
class Repository:
    """One repository: its files as of the last commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class HubDouble:
    """The server; a context manager.

    Attributes:
        repositories: "owner/name" -> repository.
        stored: sha256 -> content of large files, committed or not.
        requests: "METHOD path" of every request that arrived.
        breaks: called with "METHOD path" before an answer; the connection is cut where it returns "before" (the request
            has no effect) or "after" (it has, but nobody hears of it).
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.breaks: Callable[[str], str | None] = lambda request: None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubDouble":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def break_times(self, pattern: str, count: int, when: str = "before") -> None:
        """Cut the connection of the next `count` requests that match."""
        left = [count]

        def breaks(request: str) -> str | None:
            if left[0] and re.search(pattern, request):
                left[0] -= 1
                return when
            return None

        self.breaks = breaks


class Handler(BaseHTTPRequestHandler):
    hub: HubDouble
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        path = unquote(self.path.split("?")[0])
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        cut = self.hub.breaks(request)
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size // 2 if cut == "before" else size)
        if self.headers.get("Transfer-Encoding") == "chunked" and cut != "before":
            body = self.chunks()
        if cut == "before":
            return self.hang_up()
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply({"error": "Invalid username or password."}, 401)
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, request)
            if match:
                status, content, headers = method(self, body, *match.groups())
                return self.hang_up() if cut == "after" else self.reply(content, status, headers)
        return self.reply({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, content: dict | list | bytes, status: int = 200, headers: dict | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- what is asked; each gives status, content, headers -------------------------------------------------------

    def create(self, body: bytes) -> tuple:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name.startswith("others/"):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}, {}
        status = 409 if name in self.hub.repositories else 200
        if status == 200:
            self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
        return status, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name}, {}

    def validate(self, body: bytes) -> tuple:
        wrong = not json.loads(body)["content"].startswith("---\n")
        return (400 if wrong else 200), {"errors": [{"message": "no metadata"}] if wrong else [], "warnings": []}, {}

    def preupload(self, body: bytes, name: str) -> tuple:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if LARGE.search(f["path"]) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        return 200, {"files": files}, {}

    def batch(self, body: bytes, name: str) -> tuple:
        objects = []
        for asked in json.loads(body)["objects"]:
            new = asked["oid"] not in self.hub.stored
            upload = {"upload": {"href": f"{self.hub.endpoint}/lfs/{asked['oid']}"}}
            objects.append({**asked, **({"actions": upload} if new else {})})
        return 200, {"transfer": "basic", "objects": objects}, {}

    def put(self, body: bytes, oid: str) -> tuple:
        assert hashlib.sha256(body).hexdigest() == oid, "half a file must not be kept"
        self.hub.stored[oid] = body
        return 200, b"", {}

    def commit(self, body: bytes, name: str) -> tuple:
        repository, files = self.hub.repositories[name], {}
        header, *operations = [json.loads(line) for line in body.splitlines()]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                assert operation["key"] == "file", operation
                files[value["path"]] = base64.b64decode(value["content"])
        repository.files |= files
        repository.commits.append(header["value"]["summary"])
        return (
            200,
            {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{repository.sha}", "commitOid": repository.sha},
            {},
        )

    def info(self, body: bytes, name: str) -> tuple:
        if name not in self.hub.repositories:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        repository = self.hub.repositories[name]
        files = [{"rfilename": file} for file in repository.files]
        return 200, {"id": name, "private": repository.private, "sha": repository.sha, "siblings": files}, {}

    def resolve(self, body: bytes, name: str, file: str) -> tuple:
        repository = self.hub.repositories.get(name)
        if repository is None or file not in repository.files:
            code = "EntryNotFound" if repository else "RepoNotFound"
            return 404, {"error": "Entry not found"}, {"X-Error-Code": code}
        content = repository.files[file]
        return 200, content, {"X-Repo-Commit": repository.sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}


ROUTES = (
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (r"POST /api/models/(\w+/[\w-]+)/preupload/main", Handler.preupload),
    (r"POST /(\w+/[\w-]+)\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /lfs/(\w+)", Handler.put),
    (r"POST /api/models/(\w+/[\w-]+)/commit/main", Handler.commit),
    (r"GET /api/models/(\w+/[\w-]+)(?:/revision/\w+)?", Handler.info),
    (r"(?:GET|HEAD) /(\w+/[\w-]+)/resolve/\w+/(.+)", Handler.resolve),
)
