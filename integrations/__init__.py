"""Penstock inside the loops that people already have."""
