"""Texts that lie in R's data or in YAML come out whole, line by line, and whatever else lies there is refused."""

from __future__ import annotations

import sys
import zlib

import pytest

from gated_attn import corpora
from gated_attn.errors import MissingExtraError, SampleError

ASCII, UTF8, LATIN1 = 0x40009, 0x8009, 0x4009


def number(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


def string(text: bytes, kind: int = ASCII) -> bytes:
    return number(kind) + number(len(text)) + text


HEAD = b"X\n" + number(3) + number(0x40201) + number(0x30500) + number(5) + b"UTF-8"


def vector(*strings: bytes) -> bytes:
    """What R 4.2.1 writes for a vector of strings."""
    return HEAD + number(16) + number(len(strings)) + b"".join(strings)


def database(*values: bytes) -> bytes:
    return b"".join(number(len(value)) + zlib.compress(value) for value in values)


def test_the_vectors_of_an_r_database_are_its_texts_in_order():
    poem = vector(string(b"POEM"), string(b""), string("it cost £7".encode(), UTF8), string(b""))
    song = vector(string(b"SONG"))
    other = vector(string(b"OTHER"), string(b" la  la "))

    made = corpora.r_texts([database(poem, song), database(other)])

    assert made.decode() == "POEM\n\nit cost £7\n\n\n\nSONG\n\n\n\nOTHER\n la  la \n"


WRONG_VALUES = {
    "an old format": (HEAD.replace(number(3), number(2), 1) + number(16) + number(0), "only XDR, version 3"),
    "text format": (b"A\n3\n262657\n", "only XDR, version 3"),
    "a list": (HEAD + number(19) + number(0), "is of type 0x13: only a bare vector of strings"),
    "a vector with attributes": (HEAD + number(16 | 0x200) + number(0), "is of type 0x210: only a bare vector"),
    "latin-1": (vector(string(b"\xa3", LATIN1)), "string of R is of type 0x4009: only ASCII"),
    "a missing string": (vector(string(b"a"), number(9) + number(-1)), "string of R is of type 0x9: only ASCII"),
    "a negative length": (vector(number(ASCII) + number(-1)), "ends early: -1 bytes expected"),
    "a string cut short": (vector(string(b"whole"))[:-2], "ends early: 5 bytes expected, 3 left"),
    "a string too few": (vector(string(b"whole"))[:-13], "ends early: 4 bytes expected, 0 left"),
    "something behind": (vector(string(b"whole")) + b"xy", "2 bytes after its end"),
    "nothing": (b"", "ends early"),
}


@pytest.mark.parametrize(("value", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_other_values_of_r_are_refused(value, message):
    with pytest.raises(SampleError, match=message):
        corpora.r_texts([database(vector(string(b"fine")), value)])


WHOLE = database(vector(string(b"a line")))
WRONG_DATABASES = {
    "cut in the stream": (WHOLE[:-1], "ends early"),
    "cut in the length": (WHOLE + b"\0\0", "ends early"),
    "another length": (number(7) + WHOLE[4:], "a value of 7 bytes has 45"),
    "another compression": (number(7) + b"Z" + WHOLE[4:], "not a zlib stream"),
}


@pytest.mark.parametrize(("raw", "message"), WRONG_DATABASES.values(), ids=WRONG_DATABASES)
def test_broken_r_databases_are_refused(raw, message):
    with pytest.raises(SampleError, match=message):
        corpora.r_texts([raw])


DIALOGUES = r"""
categories:
- tests
conversations:
- - 'It''s 3: odd, isn''t it?'
  - "a \"quoted\" tab\tand a caf\u00e9"
- - a plain line
    that goes on
- - a programme, please
  - |
    Here:

    ```
    if x:
        y
    ```
- nobody answers
- - He said "hi" # and this is a comment
  - 'no: mapping'
"""


def test_dialogues_are_a_line_for_an_utterance_and_each_stands_once():
    pytest.importorskip("yaml")

    made = corpora.dialogues([DIALOGUES.encode(), b"conversations:\n- - Good-bye\n  - '22'\n", DIALOGUES.encode()])

    assert made.decode().split("\n") == [
        "It's 3: odd, isn't it?",
        'a "quoted" tab and a café',
        "",
        "a plain line that goes on",
        "",
        "a programme, please",
        "Here: ``` if x: y ```",
        "",
        'He said "hi"',
        "no: mapping",
        "",
        "Good-bye",
        "22",
        "",
    ]


WRONG_DIALOGUES = {
    "a list of lists": ("conversations:\n- - hm\n  - - deeper\n", "is not a list of utterances: .*deeper"),
    "a number": ("conversations:\n- - in which year\n  - 1963\n", "is not a list of utterances: .*1963"),
    "an empty utterance": ("conversations:\n- - hm\n  - '  '\n", "is not a list of utterances"),
    "a silent one": ("conversations:\n- []\n", "is not a list of utterances"),
    "a mapping": ("conversations:\n- a: b\n", "is not a list of utterances"),
    "nothing said": ("categories:\n- none\n", "no list `conversations`"),
    "no mapping": ("- a\n", "no list `conversations`"),
    "no YAML": ("conversations: [", "is not YAML"),
}


@pytest.mark.parametrize(("written", "message"), WRONG_DIALOGUES.values(), ids=WRONG_DIALOGUES)
def test_other_yaml_is_refused(written, message):
    pytest.importorskip("yaml")
    with pytest.raises(SampleError, match=message):
        corpora.dialogues([written.encode()])


def test_without_pyyaml_dialogues_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(MissingExtraError, match=r"reading dialogues needs pyyaml.*gated-attn\[samples\]"):
        corpora.dialogues([b""])
