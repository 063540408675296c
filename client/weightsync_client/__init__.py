"""The WeightSync client: pushes versions, applies them and reads them back."""
