"""Small named objects in a directory or at any fsspec URL: what leases, manifests and pins are written with.

    Objects          create (exclusively), write, read, names, delete
    LocalObjects     a directory
    RemoteObjects    an fsspec URL: s3://, gs://, memory://, ...

Decision: one primitive carries all agreement between machines, exclusive creation. A local file system has it as
`link`, S3 as `If-None-Match: *`, GCS as `ifGenerationMatch=0`; none of them needs a lock server.

Decision: secrets for a remote store come from the environment or from what the store's own library reads; a URL that
holds one is refused, since URLs are printed and recorded.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from rollouts_core.errors import BadInput, StoreUnavailable
from rollouts_core.store.remembered import stamps_in

S3_SETTINGS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "max_attempts": 8}}
"""Seconds, and attempts with exponential backoff: about two minutes of an unreachable store are waited out."""


class Objects(Protocol):
    """Raises `StoreUnavailable` (remote) or OSError (local) where the place can't be reached."""

    @property
    def place(self) -> str:
        """The place as messages name it."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object, whole or not at all; False when there is one of that name."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace an object, whole or not at all."""

    def read(self, name: str) -> bytes | None: ...

    def read_many(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """The content of several objects by name; objects that don't exist are left out."""

    def names(self, prefix: str) -> list[str]:
        """The names of all objects below a directory, at any depth, sorted."""

    def stamps(self, prefix: str) -> dict[str, str]:
        """Name to what changes when the object is written again, of all objects directly below a directory."""

    def delete(self, name: str) -> None:
        """Delete an object; does nothing if it doesn't exist."""


class LocalObjects:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.place = str(root)

    def create(self, name: str, data: bytes) -> bool:
        unfinished = self._unfinished(name, data)
        try:
            os.link(unfinished, self._root / name)
        except FileExistsError:
            return False
        finally:
            unfinished.unlink()
        return True

    def write(self, name: str, data: bytes) -> None:
        self._unfinished(name, data).replace(self._root / name)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_many(self, names: Sequence[str]) -> Mapping[str, bytes]:
        return {name: content for name in names if (content := self.read(name)) is not None}

    def names(self, prefix: str) -> list[str]:
        found = (path for path in (self._root / prefix).rglob("*") if path.is_file() and not path.name.startswith("."))
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def stamps(self, prefix: str) -> dict[str, str]:
        return {f"{prefix}/{name}": stamp for name, stamp in stamps_in(self._root / prefix).items()}

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _unfinished(self, name: str, data: bytes) -> Path:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return unfinished


class RemoteObjects:
    def __init__(self, url: str) -> None:
        import fsspec

        parts = urlsplit(url)
        if parts.password or parts.query:
            raise BadInput(f"store {parts.scheme}://{parts.hostname}: keep secrets out of the URL, in the environment")
        options: dict[str, Any] = {"use_listings_cache": False}
        if parts.scheme in ("s3", "s3a"):
            options["config_kwargs"] = S3_SETTINGS
        try:
            self.fs, root = fsspec.core.url_to_fs(url.rstrip("/"), **options)
        except (ImportError, ValueError) as error:
            raise BadInput(f"store {url}: {error}") from None
        self._root = str(root)
        self.place = url

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def create(self, name: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            raise self.unavailable(error) from error
        return True

    def write(self, name: str, data: bytes) -> None:
        try:
            self.fs.pipe_file(self.path(name), data)
        except Exception as error:
            raise self.unavailable(error) from error

    def read(self, name: str) -> bytes | None:
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self.unavailable(error) from error
        return content

    def read_many(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """The content of several objects by name, read concurrently if the file system can; without missing ones."""
        if not names:
            return {}
        try:
            found = self.fs.cat([self.path(name) for name in names], on_error="return")
        except FileNotFoundError:  # of one name alone
            return {}
        except Exception as error:
            raise self.unavailable(error) from error
        contents = found if isinstance(found, dict) else {self.path(names[0]): found}
        for content in contents.values():
            if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                raise self.unavailable(content) from content
        return {self._name(path): content for path, content in contents.items() if isinstance(content, bytes)}

    def names(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def folders(self, prefix: str) -> list[str]:
        """The names directly below a directory, without what is in them."""
        return sorted(details["name"].rstrip("/").rpartition("/")[2] for details in self._listed(prefix))

    def stamps(self, prefix: str) -> dict[str, str]:
        return {
            self._name(details["name"]): str(details.get("ETag") or (details.get("LastModified"), details["size"]))
            for details in self._listed(prefix)
            if details["type"] == "file"
        }

    def sizes(self, prefix: str) -> dict[str, int]:
        """Name to size in bytes of all objects below a directory."""
        try:
            found = self.fs.find(self.path(prefix), detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self.unavailable(error) from error
        named = {self._name(path): details["size"] for path, details in found.items()}
        return {name: int(size) for name, size in named.items() if name.startswith(f"{prefix}/")}

    def delete(self, name: str) -> None:
        try:
            self.fs.rm_file(self.path(name))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self.unavailable(error) from error

    def unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"store {self.place}: {type(error).__name__}: {error}")

    def _listed(self, prefix: str) -> list[dict[str, Any]]:
        """The entries directly below a directory, as fsspec describes them."""
        try:
            return list(self.fs.ls(self.path(prefix), detail=True))
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self.unavailable(error) from error

    def _name(self, path: str) -> str:
        return path.removeprefix("/" if not self._root.startswith("/") else "").removeprefix(self._root + "/")
