"""vLLM's own plug points for the transfer of weights, with WeightSync behind them."""

from __future__ import annotations

#: The method of ranks that the API process alone calls.
UPDATE = "weightsync_update"
