"""Programs that show how WeightSync is used; each is run by a test."""
