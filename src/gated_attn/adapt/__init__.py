"""Rewriting trained models by what was measured of them."""
