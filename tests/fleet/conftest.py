"""Three members of etcd that the tests of a module share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def one_three(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    cluster = Etcd(etcd, tmp_path_factory.mktemp("three"), 3)
    yield cluster
    cluster.close()


@pytest.fixture
def three(one_three: Etcd) -> Iterator[Etcd]:
    """Three members that run again after the test, whatever it has done to them."""
    yield one_three
    one_three.mend()
