"""Packages are verified before they are used, and unpacked only inside their folder."""

from __future__ import annotations

import io
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gated_attn.errors import SampleError
from gated_attn.registry import Package, UnreachableError, download, file_sha256, unpack, verify

FILES = {"pkg/model/config.json": b"{}", "pkg/model/deep/vocab.txt": b"a\nb\n", "pkg/code.py": b"raise SystemExit\n"}


def make_zip(file: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file


def make_tar(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def make_deb(file: Path, members: dict[str, bytes]) -> Path:
    root = file.parent / "deb-root"
    for name, content in {**members, "DEBIAN/control": CONTROL}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, file], check=True, stdout=subprocess.DEVNULL)
    return file


CONTROL = b"Package: pkg\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.invalid>\nDescription: a test\n"
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is only on Debian's family")
KINDS = [
    pytest.param(make_zip, "a.whl", id="wheel"),
    pytest.param(make_tar, "a.tgz", id="tar"),
    pytest.param(make_deb, "a.deb", id="deb", marks=needs_dpkg),
]


@pytest.mark.parametrize(("make", "name"), KINDS)
def test_unpack_keeps_only_what_matches(tmp_path, make, name):
    written = unpack(make(tmp_path / name, FILES), "pkg/model/*", tmp_path / "out")

    assert {str(file.relative_to(tmp_path / "out")): file.read_bytes() for file in written} == {
        "config.json": b"{}",
        "deep/vocab.txt": b"a\nb\n",
    }
    assert sorted(file for file in (tmp_path / "out").rglob("*") if file.is_file()) == written


@pytest.mark.parametrize(
    "evil", ["../evil.txt", "pkg/model/../../../evil.txt", "/evil.txt", "pkg\\..\\evil.txt", "c:/evil.txt"]
)
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_an_archive_that_points_outside_is_refused_before_the_first_write(tmp_path, make, evil):
    archive = make(tmp_path / ("a.whl" if make is make_zip else "a.tgz"), {**FILES, evil: b"evil"})

    with pytest.raises(SampleError, match="points outside the archive"):
        unpack(archive, "*", tmp_path / "in" / "out")

    assert {file.name for file in tmp_path.rglob("*")} == {archive.name}


def test_links_are_passed_over(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        for name, kind in (("pkg/link.txt", tarfile.SYMTYPE), ("pkg/hard.txt", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(secret)
            archive.addfile(info)
        info = tarfile.TarInfo("pkg/real.txt")
        archive.addfile(info, io.BytesIO())

    assert [file.name for file in unpack(tmp_path / "a.tgz", "pkg/*.txt", tmp_path / "out")] == ["real.txt"]


def test_an_archive_without_the_kept_files_is_an_error(tmp_path):
    with pytest.raises(SampleError, match=r"a\.tgz holds no file that matches other/\*"):
        unpack(make_tar(tmp_path / "a.tgz", FILES), "other/*", tmp_path / "out")


def test_verify_shows_both_hashes(tmp_path):
    file = make_zip(tmp_path / "a.whl", FILES)
    verify(Package("pip-wheel", "a", "1", "a.whl", file_sha256(file)), file)

    with pytest.raises(SampleError, match=f"(?s)expected sha256 {'0' * 64}.*found sha256    {file_sha256(file)}"):
        verify(Package("pip-wheel", "a", "1", "a.whl", "0" * 64), file)


def make_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, in a folder of its own that can serve as a local index."""
    folder.mkdir()
    info = "gated_attn_probe-1.0.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: gated-attn-probe\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        "probe/data.txt": b"data",
    }
    return make_zip(folder / "gated_attn_probe-1.0-py3-none-any.whl", files)


def probe(sha256: str, version: str = "1.0") -> Package:
    return Package("pip-wheel", "gated-attn-probe", version, f"gated_attn_probe-{version}-py3-none-any.whl", sha256)


@pytest.fixture
def local_index(tmp_path, monkeypatch) -> Path:
    """The wheel that pip finds when it may look at no index but one folder."""
    wheel = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "download").mkdir()
    return tmp_path / "download"


def test_pip_downloads_the_pinned_file(local_index, folder):
    file = download(probe(file_sha256(local_index)), folder)

    assert file.read_bytes() == local_index.read_bytes()


def test_pip_refuses_other_bytes_and_both_hashes_are_shown(local_index, folder):
    with pytest.raises(
        SampleError, match=f"(?s)expected sha256 {'0' * 64}.*found sha256    {file_sha256(local_index)}"
    ):
        download(probe("0" * 64), folder)

    assert not list(folder.glob("*.whl"))


def test_a_missing_release_says_what_was_tried(local_index, folder):
    with pytest.raises(
        SampleError, match=r"(?s)pip download .*gated-attn-probe==2\.0\n.*exit 1; .*No matching"
    ) as caught:
        download(probe("0" * 64, version="2.0"), folder)

    assert not isinstance(caught.value, UnreachableError)


@pytest.mark.network
def test_an_unreachable_index_is_told_apart(folder, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")

    with pytest.raises(UnreachableError, match="exit 1"):
        download(probe("0" * 64), folder)


def fake_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> None:
    """A program `name`, first on the PATH, that runs `body` in Python."""
    program = tmp_path / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))


@pytest.mark.parametrize(
    ("how", "client", "arguments"),
    [("npm", "npm", ["pack", "thing@1.2"]), ("apt", "apt-get", ["download", "thing=1.2"])],
)
def test_other_clients_write_the_file_into_the_folder(tmp_path, folder, monkeypatch, how, client, arguments):
    body = f"assert sys.argv[1:] == {arguments}, sys.argv\npathlib.Path('thing.file').write_bytes(b'data')"
    fake_client(tmp_path, monkeypatch, client, body)
    sha256 = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"  # of b"data"

    assert download(Package(how, "thing", "1.2", "thing.file", sha256), folder).read_bytes() == b"data"


def test_a_client_that_writes_nothing_is_an_error(tmp_path, folder, monkeypatch):
    fake_client(tmp_path, monkeypatch, "npm", "print('all fine')")

    with pytest.raises(SampleError, match=r"(?s)tried: npm pack thing@1.*exit 0, but no file thing\.tgz.*all fine"):
        download(Package("npm", "thing", "1", "thing.tgz", "0" * 64), folder)


def test_a_client_that_cannot_connect_is_told_apart(tmp_path, folder, monkeypatch):
    fake_client(tmp_path, monkeypatch, "npm", "print('npm error code ECONNREFUSED')\nsys.exit(1)")

    with pytest.raises(UnreachableError, match="ECONNREFUSED"):
        download(Package("npm", "thing", "1", "thing.tgz", "0" * 64), folder)


def test_a_missing_client_is_named(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SampleError, match="npm is not installed"):
        download(Package("npm", "thing", "1", "thing.tgz", "0" * 64), folder)
