"""Density models: MADE for rows, Gaussian mixtures for labels, and density ratios as row weights."""
