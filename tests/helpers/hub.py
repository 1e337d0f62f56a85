"""A hub on this machine: what ``huggingface_hub`` asks while a folder is uploaded, answered as the real one does.

Its client is the real one and speaks HTTP to it (``HF_ENDPOINT``), with large files by LFS; Xet, the real hub's other
protocol, is not spoken (``HF_HUB_DISABLE_XET=1``).
"""

import base64
import hashlib
import json
import re
import socket
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of-the-tests"
LARGE = 8192  # bytes from which a file is sent by LFS
LOST = 0  # in the place of a status: the connection is closed without an answer


class Hub:
    """Its state, and the server.

    Attributes:
        files: of each branch of each repository, by path.
        private: repositories that were made so.
        fails: what the next requests whose path contains a key are answered, one for each.
        asked: all requests, as method and path.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.fails: dict[str, list[int]] = {}
        self.asked: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """What a process is told of it."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- requests: the parts of the path, and what was sent; status and answer ---------------------------------------

    def whoami(self, sent: bytes) -> tuple[int, Any]:
        return 200, {"type": "user", "name": "me", "orgs": []}

    def create(self, sent: bytes) -> tuple[int, Any]:
        asked = json.loads(sent)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        answer = {"url": f"{self.url}/{name}"}
        if name in self.files:
            return 409, {**answer, "error": "You already created this model repo"}
        self.files[name] = {"main": {}}
        self.private |= {name} if asked.get("visibility") == "private" else set()
        return 200, answer

    def branch(self, sent: bytes, name: str, branch: str) -> tuple[int, Any]:
        if branch in self.files[name]:
            return 409, {"error": "Reference already exists"}
        self.files[name][branch] = dict(self.files[name]["main"])
        return 200, {}

    def info(self, sent: bytes, name: str, branch: str) -> tuple[int, Any]:
        return 200, {"_id": "0", "id": name, "sha": "0" * 40, "siblings": []}

    def validate(self, sent: bytes) -> tuple[int, Any]:
        assert json.loads(sent)["content"].startswith("---\n")
        return 200, {"errors": [], "warnings": []}

    def preupload(self, sent: bytes, name: str, branch: str) -> tuple[int, Any]:
        there = self.files[name][branch]

        def mode(file: Mapping[str, Any]) -> dict[str, Any]:
            large, known = file["size"] >= LARGE, there.get(file["path"])
            oid = None if known is None else _sha256(known) if large else _git(known)
            return {
                "path": file["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": oid,
            }

        return 200, {"files": [mode(file) for file in json.loads(sent)["files"]]}

    def batch(self, sent: bytes, name: str) -> tuple[int, Any]:
        def wanted(each: Mapping[str, Any]) -> dict[str, Any]:
            upload = {"actions": {"upload": {"href": f"{self.url}/large/{each['oid']}"}}}
            return {"oid": each["oid"], "size": each["size"], **({} if each["oid"] in self.large else upload)}

        return 200, {"transfer": "basic", "objects": [wanted(each) for each in json.loads(sent)["objects"]]}

    def put(self, sent: bytes, oid: str) -> tuple[int, Any]:
        assert _sha256(sent) == oid
        self.large[oid] = sent
        return 200, {}

    def commit(self, sent: bytes, name: str, branch: str) -> tuple[int, Any]:
        for line in map(json.loads, sent.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "file":
                self.files[name][branch][value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                self.files[name][branch][value["path"]] = self.large[value["oid"]]
            else:
                assert kind == "header"
        return 200, {"success": True, "commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}


MODEL = r"/api/models/([^/]+/[^/]+)"
ROUTES: Mapping[str, Callable[..., tuple[int, Any]]] = {
    r"GET /api/whoami-v2": Hub.whoami,
    r"POST /api/repos/create": Hub.create,
    rf"POST {MODEL}/branch/([^/]+)": Hub.branch,
    rf"GET {MODEL}/revision/([^/]+)": Hub.info,
    r"POST /api/validate-yaml": Hub.validate,
    rf"POST {MODEL}/preupload/([^/]+)": Hub.preupload,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": Hub.batch,
    r"PUT /large/(\w+)": Hub.put,
    rf"POST {MODEL}/commit/([^/]+)": Hub.commit,
}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(200, {})

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        asked = f"{self.command} {self.path.partition('?')[0]}"
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if asked == "GET /api/agent-harnesses":  # what the client says of its user, which is no part of an upload
            return self._answer(404, {})
        self.hub.asked.append(asked)
        failing = next((left for part, left in self.hub.fails.items() if part in asked and left), None)
        status = failing.pop(0) if failing else None
        if status == LOST:
            self._call(asked, sent)  # it is done, and nobody hears of it
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif status is not None:
            self._answer(status, {"error": "said the hub"})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}" and not asked.startswith("PUT"):
            self._answer(401, {"error": "Invalid username or password."})
        else:
            self._answer(*self._call(asked, sent))
        return None

    def _call(self, asked: str, sent: bytes) -> tuple[int, Any]:
        for pattern, method in ROUTES.items():
            if found := re.fullmatch(pattern, asked):
                return method(self.hub, sent, *found.groups())
        return 404, {"error": f"no route for {asked}"}

    def _answer(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *parts: Any) -> None:
        """Nothing."""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
