from __future__ import annotations

import sys
from types import ModuleType

import pytest

from weightsync_client import Access, InvalidError
from weightsync_client.rpc.channels import Link


@pytest.mark.parametrize(
    ("address", "told", "dialled"),
    [
        ("127.0.0.1:50551", [":50552", ":50553"], ["127.0.0.1:50552", "127.0.0.1:50553"]),
        ("weights.example:50551", [":50552"], ["weights.example:50552"]),
        ("[::1]:50551", [":50552"], ["[::1]:50552"]),
        ("dns:///weights.example:50551", [":50552"], ["dns:///weights.example:50552"]),
        ("unix:/run/w.sock", ["unix:/run/w.sock.1"], ["unix:/run/w.sock.1"]),
        # Through a forwarder the server sees another kind of caller than the one who dialled.
        ("127.0.0.1:50551", ["unix:/run/w.sock.1"], []),
        ("unix:/run/w.sock", [":50552"], []),
        ("127.0.0.1:50551", [], []),
        # A host of the server's choosing could be anybody's: the token goes to none.
        ("127.0.0.1:50551", ["elsewhere.example:50552"], []),
    ],
)
def test_data_ports_are_dialled_on_the_host_that_was_dialled(
    address: str, told: list[str], dialled: list[str]
) -> None:
    assert Link(address).endpoints(told) == dialled


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("http://127.0.0.1:50551", "use HOST:PORT without http://"),
        ("https://weights.example", "use HOST:PORT without https://"),
        ("127.0.0.1:65536", "ports end at 65535"),
        ("[::1]:99999", "ports end at 65535"),
        ("foo", "'foo', which has no port; use HOST:PORT"),
        ("foo:", "which has no port"),
        ("[::1]", "which has no port"),
        ("dns:///weights.example", "which has no port"),
        ("dns://8.8.8.8/weights.example", "which has no port"),
        ("::1", r"stands in \[ \] before its port"),
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused(address: str, remedy: str) -> None:
    with pytest.raises(InvalidError, match=remedy):
        Link(address)


@pytest.mark.parametrize(
    "address",
    ["foo:1", "[::1]:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "dns://8.8.8.8/foo:1", "xds:///foo"],
)
def test_an_address_that_can_be_dialled_is_taken(address: str) -> None:
    assert Link(address).address == address


def test_calls_name_the_span_of_a_program_that_uses_opentelemetry() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    link = Link("127.0.0.1:50551", Access(token="secret"))
    authority = ("authorization", "Bearer secret")
    assert [*link.metadata] == [authority]
    with sdk.TracerProvider().get_tracer("t").start_as_current_span("s") as span:
        found = span.get_span_context()
        named = f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"
        assert [*link.metadata] == [authority, ("traceparent", named)]
    assert not Link("unix:/s", Access(token="")).metadata


def test_a_program_that_is_importing_opentelemetry_names_no_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "opentelemetry.trace"
    # As Python has it until the module has run.
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not Link("unix:/s", Access(token="")).metadata
