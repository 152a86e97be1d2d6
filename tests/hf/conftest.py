"""What several tests of this folder build on."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def timm_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """timm's file of attention classes: the package itself cannot be imported without torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("timm", "timm.layers"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(next(iter(spec.submodule_search_locations))).joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    yield importlib.import_module("timm.layers.attention")
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
