"""Checks proofs again, with NumPy alone and none of the code that found them."""
