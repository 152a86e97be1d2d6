"""Measuring models: statistics of attention, gates and activations."""
