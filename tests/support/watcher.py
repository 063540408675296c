"""A watch in a process of its own: ADDRESS CA TOKEN. Writes a line for each change and the end."""

from __future__ import annotations

import json
import sys

from weightsync_client import Access, Client, ClientError, Retry

if __name__ == "__main__":
    address, ca, token = sys.argv[1:]
    access = Access(token=token, tls_ca=ca)
    with Client(address, model="default", access=access, retry=Retry(attempts=1)) as client:
        try:
            for change in client.watch():
                print(change.version.version, flush=True)  # noqa: T201 - what the starter waits for
        except ClientError as error:
            told = {"reason": error.reason.name, "message": str(error)}
            print(json.dumps(told), flush=True)  # noqa: T201 - what the starter waits for
