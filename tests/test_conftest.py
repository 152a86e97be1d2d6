"""The test suite's own promises: sockets are blocked, the threads are one."""

from __future__ import annotations

import socket
import urllib.request

import pytest
import torch


def test_connections_are_refused_without_asking_for_it():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        with pytest.raises(AssertionError, match="tried to open a connection"):
            probe.connect(("127.0.0.1", 9))
        with pytest.raises(AssertionError, match="tried to open a connection"):
            probe.connect_ex(("127.0.0.1", 9))


def test_names_are_not_looked_up():
    with pytest.raises(AssertionError, match="tried to open a connection"):
        socket.getaddrinfo("example.invalid", 80)
    with pytest.raises(AssertionError, match="tried to open a connection"):
        urllib.request.urlopen("http://example.invalid/")


@pytest.mark.network
def test_the_network_mark_lifts_the_block():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, socket.socket() as probe:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        probe.connect(listener.getsockname())


def test_one_thread_per_worker():
    assert torch.get_num_threads() == 1
