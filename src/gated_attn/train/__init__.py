"""Training: recipes, data, the one training entry, and the comparison of gates."""
