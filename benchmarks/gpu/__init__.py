"""The benchmark for hosts with GPUs: our applies and pushes beside their peers and their limits."""
