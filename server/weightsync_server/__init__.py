"""The WeightSync server: receives versions, stages them and applies them to an engine."""
