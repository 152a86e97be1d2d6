"""Files and folders that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from gated_attn.codec import drafted
from gated_attn.errors import CheckpointError


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    with drafted(target) as draft:
        assert not target.parent.exists()
        draft.mkdir(parents=True)
        (draft / "file").write_text("whole")
        assert not target.exists()
        assert draft.parent == target.parent
    assert (target / "file").read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("kind", ["folder", "file", "nothing"])
def test_a_failure_leaves_nothing(tmp_path: Path, kind: str) -> None:
    def write() -> None:
        with drafted(tmp_path / "out") as draft:
            if kind == "folder":
                (draft / "below").mkdir(parents=True)
            elif kind == "file":
                draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_refused_or_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    with pytest.raises(CheckpointError, match=r"out exists and is not overwritten: name another path, or remove it"):
        drafted(target).__enter__()
    with drafted(target, replace=True) as draft:
        draft.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link exists"):
        drafted(tmp_path / "link").__enter__()


def test_nothing_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), drafted(tmp_path / "out"):
        pass
