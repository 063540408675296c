"""What the trainer's process inherits."""

from __future__ import annotations

from weightsync_server.extensions.trainer.trainer_settings import trainer_environment

KEPT = {
    "PATH": "/bin",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/models",
    "TOKENIZERS_PARALLELISM": "false",
    "KEYBOARD": "us",
    "WEIGHTSYNC_FAILPOINTS": "@plan",
}
LEFT_OUT = [
    "WEIGHTSYNC_TOKEN",
    "WEIGHTSYNC_TLS_KEY",
    "WEIGHTSYNC_AUTHORITY",
    "AWS_PROFILE",
    "AZURE_STORAGE_ACCOUNT",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "wandb_api_key",
    "DB_PASSWORD",
    "SESSION_SECRET",
]


def test_nothing_secret_and_everything_else() -> None:
    given = KEPT | dict.fromkeys(LEFT_OUT, "secret")
    assert trainer_environment(given) == KEPT
