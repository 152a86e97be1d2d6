"""Check the documents: every relative link leads to a file (and heading), every Python block compiles.

Looks at README.md, CHANGELOG.md, CONTRIBUTING.md and docs/*.md. Addresses on the web are not visited. Exits with 1 and
one line per fault.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"!?\[[^\]]*\]\(<?(?P<target>[^)\s>]+)>?[^)]*\)")
INLINE_CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that the usual Markdown renderers make of a document's headings."""
    titles = (match["title"] for match in HEADING.finditer(FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def link_faults(file: Path, text: str) -> Iterator[str]:
    for match in LINK.finditer(INLINE_CODE.sub("", FENCE.sub("", text))):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        there = (file.parent / target).resolve() if target else file
        if not there.exists():
            yield f"links to {match['target']}, which does not exist"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
            yield f"links to {match['target']}, but {there.name} has no such heading"


def code_faults(text: str) -> Iterator[str]:
    for match in FENCE.finditer(text):
        body = textwrap.dedent(match["body"])
        if match["language"] not in ("python", "py") or body.lstrip().startswith(">>>"):
            continue
        line = text.count("\n", 0, match.start()) + 1
        try:
            compile(body, f"the block at line {line}", "exec")
        except SyntaxError as error:
            yield f"has Python at line {line} that does not compile: {error}"


def main() -> int:
    files = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    files += sorted((ROOT / "docs").glob("*.md"))
    faults = []
    for file in files:
        name = file.relative_to(ROOT)
        if not file.exists():
            faults.append(f"{name} does not exist")
            continue
        text = file.read_text(encoding="utf-8")
        faults += [f"{name} {fault}" for fault in (*link_faults(file, text), *code_faults(text))]
    print("\n".join(faults) or f"{len(files)} documents: links and Python blocks are fine")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
