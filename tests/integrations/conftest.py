"""Integrations' own tests open no sockets, unless they start an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_socket import disable_socket, enable_socket


@pytest.fixture(autouse=True)
def _no_sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    # An engine has sockets of its own, between its parts.
    if request.node.get_closest_marker("engine"):
        yield
        return
    # An event loop's own pair of sockets has no address.
    disable_socket(allow_unix_socket=True)
    yield
    enable_socket()
