"""How the files of a package become one text: plain files, R's data, dialogues in YAML. The standard library, PyYAML apart.

Whatever a file holds beyond what is described here is a `SampleError`: nothing is guessed and nothing half read.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence

from gated_attn.errors import MissingExtraError, SampleError

__all__ = ["dialogues", "plain", "r_texts"]


def plain(files: Sequence[bytes]) -> bytes:
    """The files one after the other, three empty lines between two of them."""
    return b"\n\n\n".join(file.strip(b"\r\n") + b"\n" for file in files)


def r_texts(files: Sequence[bytes]) -> bytes:
    """The texts in R's lazy-load databases (`.rdb`), each a vector of lines, joined as plain files are.

    A database is its variables one after the other, in alphabetical order: the length of the serialised value, 4 bytes,
    big-endian, and the value as a zlib stream. The index beside it (`.rdx`) repeats where each starts, so it is not read.
    """
    return plain([b"\n".join(_r_strings(value)) for file in files for value in _r_values(file)])


def _r_values(database: bytes) -> Iterator[bytes]:
    while database:
        stream = zlib.decompressobj()
        try:
            value = stream.decompress(database[4:])
        except zlib.error as error:
            raise SampleError(f"an R database holds a value that is not a zlib stream: {error}") from None
        length = int.from_bytes(database[:4], "big")
        if not stream.eof or len(value) != length:
            raise SampleError(f"an R database ends early: a value of {length} bytes has {len(value)}")
        yield value
        database = stream.unused_data


_R_STRINGS = 16  # the type of a vector of strings; a higher bit would say that it has attributes or a class
_R_ASCII, _R_UTF8 = 0x40009, 0x8009  # 9, the type of one string, and the flag of its encoding; NA has no such flag


def _r_strings(value: bytes) -> list[bytes]:
    r"""The strings of a serialised R vector, in ASCII or UTF-8.

    Integers are of 4 bytes, big-endian. `X\n`; the format's version, 3, and two versions of R; the length and name of
    the writer's encoding; the vector's type; its length; then for each string its type, its length and its bytes.
    """
    stream = io.BytesIO(value)

    def take(count: int) -> bytes:
        taken = stream.read(count)
        if len(taken) != count:
            raise SampleError(f"a value of R ends early: {count} bytes expected, {len(taken)} left")
        return taken

    def integer() -> int:
        return int.from_bytes(take(4), "big", signed=True)

    if take(2) != b"X\n" or integer() != 3:
        raise SampleError(f"a value of R starts with {value[:6]!r}: only XDR, version 3, is read")
    take(8)
    take(integer())
    if (kind := integer()) != _R_STRINGS:
        raise SampleError(f"a value of R is of type {kind:#x}: only a bare vector of strings, {_R_STRINGS:#x}, is read")
    strings = []
    for _ in range(integer()):
        if (kind := integer()) not in (_R_ASCII, _R_UTF8):
            raise SampleError(
                f"a string of R is of type {kind:#x}: only ASCII, {_R_ASCII:#x}, and UTF-8, {_R_UTF8:#x}, are read"
            )
        strings.append(take(integer()))
    if rest := stream.read():
        raise SampleError(f"a value of R has {len(rest)} bytes after its end")
    return strings


def dialogues(files: Sequence[bytes]) -> bytes:
    """One utterance per line and an empty line between two conversations, from YAML files.

    A file's `conversations` is a list of lists of utterances. White space within an utterance, line breaks too, becomes
    one space. An entry that is no list but one line, which nobody answers, is left out; a conversation that is there again, too.

    Raises `MissingExtraError` without PyYAML.
    """
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("pyyaml", "samples", "reading dialogues") from None
    talks = []
    for file in files:
        try:
            found = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise SampleError(f"a file of dialogues is not YAML: {error}") from None
        entries = found.get("conversations") if isinstance(found, dict) else None
        if not isinstance(entries, list):
            raise SampleError(f"a file of dialogues has no list `conversations`; it starts with {file[:60]!r}")
        talks += ["\n".join(_utterances(entry)) for entry in entries if not isinstance(entry, str)]
    return ("\n\n".join(dict.fromkeys(talks)) + "\n").encode()


def _utterances(entry: object) -> list[str]:
    said = entry if isinstance(entry, list) else []
    lines = [" ".join(one.split()) for one in said if isinstance(one, str)]
    if not lines or len(lines) != len(said) or not all(lines):
        raise SampleError(f"a conversation is not a list of utterances: {entry!r}")
    return lines
