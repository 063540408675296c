#!/usr/bin/env bash
# Adds WeightSync to a vLLM API server: your own command line, unchanged, with one environment
# variable before it, and weightsync-server beside it.
#
#   examples/add_to_vllm.sh --model DIR --port 8000          # any vLLM flag
#
# The two meet in /run/weightsync. To use another folder, set WEIGHTSYNC_RUN_DIR; weightsync-server
# reads that variable, WEIGHTSYNC_STATE_DIR, WEIGHTSYNC_LISTEN and the like by itself.
# On a CPU set WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 besides: vLLM's CPU build repacks weights otherwise.
set -euo pipefail

if [ -n "${WEIGHTSYNC_RUN_DIR:-}" ]; then
  export WEIGHTSYNC_ENGINE_SOCKET="unix:$WEIGHTSYNC_RUN_DIR/engine.sock"
  export WEIGHTSYNC_ENGINE="$WEIGHTSYNC_ENGINE_SOCKET"
fi
mkdir -p "${WEIGHTSYNC_RUN_DIR:-/run/weightsync}"

VLLM_PLUGINS=weightsync python -m vllm.entrypoints.openai.api_server "$@" &
vllm=$!
weightsync-server &
server=$!

# When either ends, or on Ctrl-C, both end.
trap 'kill "$vllm" "$server" 2>/dev/null || true; wait' EXIT
trap 'exit 143' INT TERM
wait -n
