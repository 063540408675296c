"""A generator loop that watches for new versions, applies each and generates with it.

    python examples/generate_and_apply.py --prompt "Tell me:" --versions 3

Pushing and applying are separate: a trainer pushes when it has something, and whoever is in charge
of the generator, here this loop, decides when it goes live.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import httpx

from weightsync_client import Client, Durability, Serving


def new_versions(client: Client) -> Iterator[int]:
    """Yield each committed version that is newer than what is live, without end."""
    newest = client.status().models[0].live_version
    print(f"version {newest} is live, watching for newer ones", flush=True)
    for change in client.watch():
        version = change.version
        usable = version.durability == Durability.COMMITTED and version.serving == Serving.NO
        if usable and version.version > newest:
            newest = version.version
            yield newest


def generate(url: str, model: str, prompt: str) -> str:
    """Return a greedy completion of vLLM's OpenAI API."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def main() -> None:
    """Watch, apply and generate."""
    parser = argparse.ArgumentParser(description="Apply every new version and generate with it.")
    parser.add_argument("--prompt", required=True, help="what to complete")
    parser.add_argument("--versions", type=int, default=0, help="stop after so many; 0: never")
    parser.add_argument("--server", default="127.0.0.1:50551", help="address of weightsync-server")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000", help="vLLM's HTTP API")
    parser.add_argument("--model", default="model", help="name of the model in vLLM")
    options = parser.parse_args()
    with Client(options.server) as client:
        for count, version in enumerate(new_versions(client), 1):
            report = client.apply(version)
            text = generate(options.vllm, options.model, options.prompt)
            pause_ms = report.phases.paused_total_s * 1000
            print(f"version {version}: paused {pause_ms:.1f} ms, says {text!r}", flush=True)
            if count == options.versions:
                break


if __name__ == "__main__":
    main()
