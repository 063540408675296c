"""`python -m weightsync_client.cli`."""

from __future__ import annotations

from weightsync_client.cli.main import main

main()
