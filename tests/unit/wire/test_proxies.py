"""Who fails to reach a server through a proxy is told of the proxy."""

from __future__ import annotations

import pytest

from weightsync.wire.grpc_channels import proxy_hint

_PROXY = {"https_proxy": "http://user:secret@proxy.example:3128/"}


@pytest.mark.parametrize(
    ("address", "environment"),
    [
        ("host:1", {}),
        ("unix:/run/s.sock", _PROXY),
        ("127.0.0.1:1", _PROXY),
        ("[::1]:1", _PROXY),
        ("localhost:1", _PROXY),
        ("host:1", {"https_proxy": ""}),
        # gRPC knows them in lower case alone.
        ("host:1", {"HTTPS_PROXY": "http://proxy.example"}),
        ("host:1", _PROXY | {"no_proxy": "other, host"}),
        ("gpu7.cluster.example:1", _PROXY | {"no_proxy": ".cluster.example"}),
        ("10.1.2.3:1", _PROXY | {"no_proxy": "10.0.0.0/8"}),
        ("dns:///host:1", _PROXY | {"no_grpc_proxy": "host", "no_proxy": "x"}),
        ("[2001:db8::7]:1", _PROXY | {"no_proxy": "2001:db8::/32"}),
    ],
)
def test_a_way_without_a_proxy_needs_no_hint(address: str, environment: dict[str, str]) -> None:
    assert proxy_hint(address, environment) == ""


@pytest.mark.parametrize(
    ("address", "environment", "proxy", "host"),
    [
        ("host:1", _PROXY, "proxy.example:3128 (https_proxy)", "host"),
        ("10.1.2.3:1", _PROXY | {"no_proxy": "11.0.0.0/8,x"}, "(https_proxy)", "10.1.2.3"),
        ("host:1", {"http_proxy": "proxy.example:8080"}, "proxy.example:8080 (http_pro", "host"),
        ("host:1", _PROXY | {"grpc_proxy": "http://g:1"}, "g:1 (grpc_proxy)", "host"),
        ("host:1", _PROXY | {"no_proxy": "host", "no_grpc_proxy": "x"}, "(https_proxy)", "host"),
        ("host:1", {"http_proxy": "http://[bad"}, "there (http_proxy)", "host"),
    ],
)
def test_the_proxy_is_named_and_how_to_go_without(
    address: str, environment: dict[str, str], proxy: str, host: str
) -> None:
    hint = proxy_hint(address, environment)
    assert proxy in hint
    assert f"add {host} to no_proxy to connect without the proxy: " in hint
    assert "secret" not in hint
