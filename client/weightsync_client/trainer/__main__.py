"""The trainer's process: `python -m weightsync_client.trainer FD`."""

from __future__ import annotations

from weightsync_client.trainer.trainer_process import main

if __name__ == "__main__":
    main()
