"""docs/models.md says what the tables say: `python tests/test_docs_models.py` writes its tables anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gated_attn.cli.convert import layouts
from gated_attn.hf import families, native, plain
from gated_attn.hf.attach import NOT_DISPATCHING
from gated_attn.spec import POSITIONS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def table(*lines: tuple[str, ...]) -> str:
    head, *rows = ("| " + " | ".join(line) + " |\n" for line in lines)
    return head + "|---" * len(lines[0]) + "|\n" + "".join(rows)


def named(classes: tuple[str, ...]) -> str:
    """The models' names in classes' names."""
    words = (re.sub(r"(Self|Cross)?Attention$", "", name) for name in classes)
    return ", ".join(dict.fromkeys(words))


def serves(row: families.Family) -> str:
    kinds = " (cross attention)" if row.when else " (self and cross attention)" if row.cross else ""
    return named(row.classes) + kinds


def tables() -> dict[str, str]:
    """Name of a table on the page -> its text."""
    every = ", ".join(POSITIONS)
    timm = every.replace("weights", "weights (headwise)")
    born = [row for row in native.ROWS if row.package == "transformers"]
    return {
        "transformers": table(
            ("row", "models whose attention it serves", "positions"),
            *((row.name, serves(row), every) for row in families.FAMILIES),
        ),
        "plain": table(
            ("row", "classes", "positions"),
            *(
                (row.name, ", ".join(f"`{name}`" for name in row.classes), every if row is plain.TORCH else timm)
                for row in plain.ROWS
            ),
        ),
        "native": table(
            ("row", "models", "gate", "projection", "`convert` reads model_type"),
            *(
                (
                    row.name,
                    named(row.classes),
                    ("headwise or " if row.headwise_if[0] else "") + f"{row.width} {row.activation}",
                    f"`{row.layer}`",
                    ", ".join(f"`{kind}`" for kind in row.model_types) or "none",
                )
                for row in born
            ),
        ),
        "refused": table(
            ("attention class", "why it has no place for a gate"),
            *((f"`{name}`", why) for name, why in NOT_DISPATCHING.items()),
        ),
        "layouts": table(
            ("layout", "its projections, and the order of their rows; who stores gates so"),
            *((f"`{name}`", line.replace("   ", ": ", 1)) for name, line in layouts().items()),
        ),
    }


def marked(name: str, text: str) -> str:
    return f"<!-- table: {name} -->\n\n{text}\n<!-- end -->"


@pytest.mark.parametrize("name", tables())
def test_the_page_holds_the_tables(name: str) -> None:
    found = marked(name, tables()[name]) in PAGE.read_text(encoding="utf-8")
    assert found, f"table {name!r} of {PAGE} is old: python tests/test_docs_models.py"


def test_the_page_says_what_no_table_says_and_the_readme_leads_to_it() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for words in ("shell patterns", "Swin, BEiT and XCiT", "Gemma 2, Gemma 3 and OLMo 2", "headwise dense gate"):
        assert words in page
    readme = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert "[and more](docs/models.md)" in readme
    row = next(line for line in readme.splitlines() if "`gated-attn convert" in line)
    assert "(docs/models.md#layouts-of-checkpoints)" in row
    assert "`--layouts`" in row
    assert "\n## Layouts of checkpoints\n" in PAGE.read_text(encoding="utf-8")


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, new in tables().items():
        whole = rf"<!-- table: {name} -->.*?<!-- end -->"
        text = re.sub(whole, lambda _, name=name, new=new: marked(name, new), text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
