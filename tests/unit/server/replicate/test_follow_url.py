"""What may be followed, and the sentence for what may not."""

from __future__ import annotations

import pytest

from weightsync_server.replicate.replica_settings import (
    check_cache,
    check_follow,
    grpc_target,
    is_encrypted,
)


@pytest.mark.parametrize(
    "url",
    [
        "grpc://127.0.0.1:50551",
        "grpc://localhost:50551",
        "grpc://unix:/run/a.sock",
        "grpcs://trainer.example:50551",
        "s3://bucket/prefix",
        "gs://bucket",
        "az://container/prefix",
        "file:///var/lib/store",
        "/var/lib/store",
    ],
)
def test_an_origin_is_a_server_or_a_store(url: str) -> None:
    check_follow(url, "", ca=False, others=False)
    check_follow(url, "/elsewhere", ca=False, others=False)


def test_none_is_followed_by_default() -> None:
    check_follow("", "", ca=False, others=False)
    check_follow("", "s3://bucket", ca=False, others=False)


@pytest.mark.parametrize(
    ("url", "store", "given", "sentence"),
    [
        ("memory://", "", {}, "follow cannot be 'memory://'; use grpc://"),
        ("grpc://host", "", {}, "follow cannot be"),
        ("grpc://me:secret@host:1", "", {}, "follow cannot be"),
        ("http://host:1", "", {}, "follow cannot be"),
        ("file://host/path", "", {}, "follow cannot be"),
        ("store", "", {}, "follow cannot be"),
        ("grpc://trainer:50551", "", {}, "use grpcs://HOST:PORT, or give --follow-ca"),
        ("s3://a/b", "", {"ca": True}, "for an origin at grpc://"),
        ("file:///a", "", {"others": True}, "for an origin at grpc://"),
        ("", "", {"others": True}, "name the origin with it"),
        ("grpcs://a:1", "s3://b/c", {}, "keeps what it fetches in a folder, not in s3://b/c"),
        ("grpcs://a:1", "memory://", {}, "in a folder, not in memory://"),
        ("file:///a/b", "/a/b/", {}, "cannot follow itself"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_remedy(
    url: str, store: str, given: dict[str, bool], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_follow(url, store, **({"ca": False, "others": False} | given))


def test_a_server_is_spoken_to_by_tls_where_its_url_or_a_ca_says_so() -> None:
    assert is_encrypted("grpcs://a:1", ca=False)
    assert is_encrypted("grpc://a:1", ca=True)
    assert not is_encrypted("grpc://127.0.0.1:1", ca=False)
    assert not is_encrypted("grpc://unix:/a", ca=True)
    check_follow("grpc://trainer:50551", "", ca=True, others=True)


def test_the_address_of_a_server_is_what_grpc_dials() -> None:
    assert grpc_target("grpcs://a:1/") == "a:1"
    assert grpc_target("grpc://unix:/run/a") == "unix:/run/a"
    assert grpc_target("s3://a/b") == ""


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket", "az://container/prefix"])
def test_a_cache_stands_before_a_store_of_objects(url: str) -> None:
    check_cache("", url)
    check_cache("http://cache:8080", url)
    check_cache("https://cdn.example/weights/prod/", url)


@pytest.mark.parametrize(
    ("cache", "url", "sentence"),
    [
        ("http://cache", "", "with --follow s3://"),
        ("http://cache", "file:///store", "with --follow s3://"),
        ("http://cache", "grpc://127.0.0.1:1", "with --follow s3://"),
        ("s3://cache/prefix", "s3://bucket", "must be http://HOST:PORT/PATH"),
        ("http://", "s3://bucket", "must be http://HOST:PORT/PATH"),
        ("http://cache/?a=b", "s3://bucket", "must be http://HOST:PORT/PATH"),
        ("cache:80", "s3://bucket", "must be http://HOST:PORT/PATH"),
    ],
)
def test_any_other_cache_is_refused_in_one_sentence(cache: str, url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_cache(cache, url)


def test_what_a_cache_asks_for_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="without user") as caught:
        check_cache("http://me:secret@cache/", "s3://bucket")
    assert "secret" not in str(caught.value)
