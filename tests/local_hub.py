"""A Hub in memory for tests, which serves and accepts model repositories for the real huggingface_hub client.

    with LocalHub() as hub:              # set HF_ENDPOINT=hub.url and HF_HUB_DISABLE_XET=1 in a child process
        hub.add("org/name", folder)

It implements what the client calls: repository creation, one-commit uploads (regular files and basic LFS), revisions,
trees and downloads.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse


@dataclass
class Commit:
    sha: str
    files: dict[str, bytes]


@dataclass
class LocalHub:
    """Repositories by id, each a list of commits.

    `refuse_commits` makes the next uploads fail at their last step, `refuse_token` every call with that status.
    """

    repositories: dict[str, list[Commit]] = field(default_factory=dict)
    refuse_commits: bool = False
    refuse_token: int | None = None

    def __enter__(self):
        self.uploads: dict[str, bytes] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def environment(self, cache_folder) -> dict[str, str]:
        """Return the variables that make a child process use this Hub, with its own cache and token."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache_folder),
            "HF_TOKEN": "any",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def add(self, repo_id: str, folder) -> str:
        """Commit the files of a folder to a repository. Returns the commit's id."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        return self.commit(repo_id, files)

    def commit(self, repo_id: str, files: dict[str, bytes]) -> str:
        commits = self.repositories.setdefault(repo_id, [])
        digest = hashlib.sha1(f"{repo_id} {len(commits)}".encode())
        for name in sorted(files):
            digest.update(name.encode() + hashlib.sha1(files[name]).digest())
        commits.append(Commit(digest.hexdigest(), dict(files)))
        return commits[-1].sha

    def find(self, repo_id: str, revision: str) -> Commit | None:
        commits = self.repositories[repo_id]
        if revision in ("main", "HEAD"):
            return commits[-1]
        return next((commit for commit in commits if commit.sha == revision), None)

    def apply(self, repo_id: str, lines: list[dict]) -> str:
        """Make one commit of the operations that the client sends. Returns the commit's id."""
        files = dict(self.repositories[repo_id][-1].files)
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        return self.commit(repo_id, files)


class Handler(BaseHTTPRequestHandler):
    """Answers requests from the state of `self.server.hub`; ROUTES maps paths to methods."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, body: bytes | dict | list, status: int = 200, kind: str = "application/json", **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str):
        self.reply({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def route(self):
        path, body = unquote(urlparse(self.path).path), self.body()
        if self.server.hub.refuse_token is not None:
            return self.fail(self.server.hub.refuse_token, "Refused")
        for pattern, action in ROUTES:
            if match := re.fullmatch(pattern, path):
                return action(self, body, *match.groups())
        self.fail(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = route

    def who_am_i(self, body):
        token = {"role": "write", "displayName": "test"}
        self.reply({"type": "user", "name": "org", "orgs": [], "auth": {"accessToken": token}})

    def create(self, body):
        request = json.loads(body)
        repo_id = f"{request.get('organization') or 'org'}/{request['name']}"
        url = f"{self.server.hub.url}/{repo_id}"
        if repo_id in self.server.hub.repositories:
            return self.reply({"error": "exists", "url": url}, 409)
        self.server.hub.commit(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.reply({"url": url, "name": repo_id, "id": repo_id})

    def validate_card(self, body):
        self.reply({"errors": [], "warnings": []})

    def choose_upload(self, body, repo_id, revision):
        def mode(path: str) -> str:
            return "lfs" if path.endswith(".safetensors") else "regular"

        names = [file["path"] for file in json.loads(body)["files"]]
        self.reply({"files": [{"path": n, "uploadMode": mode(n), "shouldIgnore": False} for n in names]})

    def lfs_batch(self, body, repo_id):
        def answer(item: dict) -> dict:
            upload = {"upload": {"href": f"{self.server.hub.url}/lfs/{item['oid']}", "header": {}}}
            return item if item["oid"] in self.server.hub.uploads else {**item, "actions": upload}

        objects = [answer(item) for item in json.loads(body)["objects"]]
        self.reply({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")

    def lfs_upload(self, body, digest):
        self.server.hub.uploads[digest] = body
        self.reply({})

    def commit(self, body, repo_id, revision):
        if self.server.hub.refuse_commits:
            return self.fail(403, "Forbidden")
        sha = self.server.hub.apply(repo_id, [json.loads(line) for line in body.splitlines()])
        self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.server.hub.url}/{repo_id}/commit/{sha}"})

    def found(self, repo_id, revision) -> Commit | None:
        if repo_id not in self.server.hub.repositories:
            return self.fail(404, "RepoNotFound")
        commit = self.server.hub.find(repo_id, revision or "main")
        return commit or self.fail(404, "RevisionNotFound")

    def info(self, body, repo_id, revision=None):
        if commit := self.found(repo_id, revision):
            siblings = [{"rfilename": name} for name in commit.files]
            self.reply({"id": repo_id, "sha": commit.sha, "private": False, "tags": [], "siblings": siblings})

    def tree(self, body, repo_id, revision):
        if commit := self.found(repo_id, revision):
            names = commit.files.items()
            self.reply([{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in names])

    def download(self, body, repo_id, revision, name):
        if not (commit := self.found(repo_id, revision)):
            return
        if name not in commit.files:
            headers = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": commit.sha}
            return self.reply({"error": "Entry not found"}, 404, **headers)
        data = commit.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": commit.sha}
        self.reply(data, kind="application/octet-stream", **headers)


MODEL = r"/api/models/([^/]+/[^/]+)"
ROUTES = (
    (r"/api/whoami-v2", Handler.who_am_i),
    (r"/api/repos/create", Handler.create),
    (r"/api/validate-yaml", Handler.validate_card),
    (MODEL + r"/preupload/([^/]+)", Handler.choose_upload),
    (MODEL + r"/commit/([^/]+)", Handler.commit),
    (MODEL + r"/tree/([^/]+)", Handler.tree),
    (MODEL, Handler.info),
    (MODEL + r"/revision/([^/]+)", Handler.info),
    (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"/lfs/([0-9a-f]+)", Handler.lfs_upload),
    (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Handler.download),
)
