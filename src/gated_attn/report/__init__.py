"""Reports: records become a table for the terminal or one HTML file. Imports `records` only, never torch."""
