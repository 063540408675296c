"""How loops are compiled with numba that no library has."""
